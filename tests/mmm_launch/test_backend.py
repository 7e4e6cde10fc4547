"""launch's part of a run on many hosts, with a made-up mpiexec: one process that connects in the place of many."""

import dataclasses
import os
import socket
import sys
import time

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.program.target import Target
from mmm_launch.run import backend
from mmm_launch.run.control import Run
from mmm_launch.spec.options import LaunchOptions
from mmm_launch.spec.plan import plan
from support.clock import PATIENCE

# What somebody sends to launch's port who is not of the run.
STRANGERS = {
    "wrong proof": bytes(64),
    "idle": b"",
    "many": b"",
    "text": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64,
    "not ascii": b'{"hello": "{}", "signed": "\xc3\xa9"}\n' + b" " * 64,
    "surrogate": b'{"hello": "\\ud800", "signed": "00"}\n' + b" " * 64,
    "deep": b"[" * 100_000 + b"\n",
}
LAUNCHER = (
    f"""
STRANGERS = {STRANGERS!r}
"""
    + """
import json, os, socket, sys, time
from mmm_launch.host import agent
entry = json.loads(os.environ["MMM_CLUSTER"])
kind = sys.argv[1]
def failure(rank, code, ago, text):
    report = {"rank": rank, "kind": "exit", "text": text, "exit_code": code, "time": 0.0}
    return {"report": report, "ago": ago}
def until_told(link):
    told = []
    while "end" not in told:
        told += [next(iter(m)) for m in link.read()]
def connected(place):
    return agent.reach(entry["at"], entry["token"], {"host": f"h{place}", "place": place, "port": 1, "error": ""})
if kind in STRANGERS:
    strangers = [socket.create_connection(tuple(entry["at"][0])) for _ in range(100 if kind == "many" else 1)]
    strangers[0].sendall(STRANGERS[kind])
if kind == "few":
    sys.exit(9)
if kind == "more":
    kept = connected(7); time.sleep(20)
if kind == "twice":
    links = [connected(0) for _ in range(2)]; time.sleep(20)
links = [connected(place) for place in range(2 - (kind == "absent"))]
if kind == "absent":
    time.sleep(60)
commands = [each.first(None)["go"] for each in links]
for each in links:
    each.send({"started": True})
if kind == "mute":
    time.sleep(20)
if kind == "lost":
    links[1].close()
    until_told(links[0])
if kind == "order":
    said = [failure(1, 5, 0.0, "rank 1 came second"), failure(0, 7, 3.0, "rank 0 came first")]
    for each in said:
        links[1].send(each)
    until_told(links[0])
if kind == "dies":
    os.kill(os.getpid(), 9)
for command, each in zip(commands, links):
    if kind != "lost" or command["first"] == 0:
        for rank in range(command["first"], command["first"] + command["count"]):
            each.send({"ended": rank, "pid": 1, "code": 0})
        each.send({"gone": 0})
        each.close()
print("done", flush=True)
"""
)


@pytest.fixture
def lead(tmp_path, monkeypatch, capfd):
    """Runs a made-up launcher backend under `Backend`: exit code, what was said, and the run."""
    monkeypatch.setenv("MMM_LAUNCH_ADDRESS", "127.0.0.1")
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    def run(kind, start_timeout=PATIENCE, timeout=None):
        spec = plan(
            Target("module", "x"),
            LaunchOptions(hosts="h0,h1", ppn=2, scheduler="none"),
            environ={"MASTER_ADDR": "h0"},
            version="HYDRA",
            build="cpu",
        )
        spec = dataclasses.replace(spec, command=[sys.executable, str(tmp_path / "launcher.py"), kind])
        made = Run(backend.Backend(spec, start_timeout), spec.ranks, timeout)
        code = made.run()
        return code, capfd.readouterr(), made

    return run


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_costs_the_run_nothing(lead, kind):
    """Whatever it sends, or does not: it is sent away, is told nothing, and the run ends as it would without it."""
    code, said, made = lead(kind)
    assert (code, said.out) == (0, "done\n")
    assert said.err in ("", "launch: a connection without this run's token was refused\n")
    assert made.ended == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("lost", 1, "ranks 2, 3 on h1"),
        ("order", 7, "rank 0 came first"),
        (
            "few",
            9,
            "exited with code 9 before the ranks could start: 2 of 2 processes that hydra was to start have not "
            "connected to launch; nothing was heard from h0, h1\n",
        ),
        ("more", 2, "(--launcher-args)"),
        ("twice", 2, "process 0 on h0"),
        ("dies", 1, "launch: lost "),
    ],
)
def test_what_can_go_wrong(lead, kind, code, says):
    found, said, _ = lead(kind)
    assert found == code, said.err
    assert says in said.err
    assert said.err.count("launch: ") + said.err.count("error: ") == (kind != "order")


def test_a_start_that_is_never_complete(lead, monkeypatch):
    join = backend.Backend.join

    def its_time_is_up_once_one_is_there(self, host, error):
        join(self, host, error)
        self.run.clocks.set(self.too_late, time.monotonic() + 0.2)

    monkeypatch.setattr(backend.Backend, "join", its_time_is_up_once_one_is_there)
    code, said, made = lead("absent")
    assert code == 1
    assert "1 of 2 processes that hydra was to start have not connected to launch" in said.err
    assert made.transport.silent_hosts == ("h1",)


@pytest.mark.long
def test_all_are_there_and_none_says_a_word(lead, monkeypatch):
    monkeypatch.setattr(backend, "LAST_WORDS", 0.2)
    code, said, _ = lead("mute", timeout=1.0)
    assert code == 124
    assert said.err == "launch: no output from any rank for 1 s (--timeout): ending 4 ranks\n"


def test_more_hosts_than_files(lead, monkeypatch):
    monkeypatch.setattr(backend, "open_files", lambda: 60)
    with pytest.raises(LaunchError, match="2 hosts"):
        lead("good")


def test_where_launch_can_be_reached(monkeypatch):
    monkeypatch.delenv("MMM_LAUNCH_ADDRESS", raising=False)

    def at(names):
        return backend.own_addresses(
            plan(Target("module", "x"), LaunchOptions(hosts=names, ppn=1), environ={}, version="HYDRA", build="cpu")
        )

    assert at("localhost") == ["127.0.0.1"]
    assert at(f"{os.uname().nodename},no-such-host-1")  # something, whatever the network here is like


@pytest.mark.parametrize(("own", "bound"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "0.0.0.0")])
def test_launch_listens_where_the_hosts_are(lead, monkeypatch, own, bound):
    """All of them here: on loopback alone."""
    found = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: found.append(create(*a, **k)) or found[-1])
    monkeypatch.setenv("MMM_LAUNCH_ADDRESS", own)
    monkeypatch.setattr(backend.Backend, "welcome", lambda self, ready: bound_to.append(found[0].getsockname()[0]))
    bound_to = []
    lead("few")
    assert bound_to[0] == bound
