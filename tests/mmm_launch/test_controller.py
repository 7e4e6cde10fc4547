"""launch's part of a run on many hosts, with a made-up mpiexec: one process that connects in the place of many."""

import dataclasses
import os
import selectors
import sys
import time
from types import SimpleNamespace

import pytest

from mmm_launch.channel import commands
from mmm_launch.program.target import Target
from mmm_launch.run import one_backend, remote
from mmm_launch.run.control import Run
from mmm_launch.spec import cluster
from mmm_launch.spec.options import LaunchOptions
from mmm_launch.spec.walltime import Limits
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
from mmm_launch.channel import handshake
entry = json.loads(os.environ["MMM_CLUSTER"])
kind = sys.argv[1]
def hello(rank, **more):
    return {"host": f"h{rank // 2}", "cores": 8, "cpus": "0-7", "rank": rank, "world": entry["processes"],
            "local_rank": rank % 2, "pid": 1, "port": 1, **more}
def failure(rank, ago, doubt, text):
    return {"failure": {"rank": rank, "exit_code": 7, "time": ago, "doubt": doubt, "report": None, "text": text,
                        "host": "", "final": False}}
def until_told(link):
    told = []
    while "end" not in told:
        told += [next(iter(m)) for m in link.read()]
def connected(hello):
    link = handshake.reach(entry["at"], entry["token"], 10.0)
    link.send({"hello": hello})
    return link
if kind in STRANGERS:
    strangers = [socket.create_connection(tuple(entry["at"][0])) for _ in range(100 if kind == "many" else 1)]
    strangers[0].sendall(STRANGERS[kind])
if kind == "few":
    sys.exit(9)
if kind == "world":
    kept = connected(hello(0, world=1)); time.sleep(20)
if kind == "twice":
    links = [connected(hello(0)) for _ in range(2)]; time.sleep(20)
links = [connected(hello(r)) for r in range(entry["processes"] - (kind == "absent"))]
if kind == "silent":
    time.sleep(20)
commands = [each.one(None)["go"] for each in links]
if kind == "lost":
    links[3].close()
    until_told(links[0])
if kind == "order":
    said = [failure(1, 0.0, 0, "rank 1 came second"), failure(2, 3.0, 0, "rank 2 came first"),
            failure(0, 9.0, 2, "rank 0 lost its connection")]
    links[1].socket.sendall(b"".join(links[1]._seal(json.dumps(each).encode()) for each in said))
    until_told(links[0])
if kind == "dies":
    os.kill(os.getpid(), 9)
for rank, each in enumerate(links):
    if kind != "lost" or rank != 3:
        each.send({"ended": int(commands[rank]["ranks"][0]["RANK"])})
        each.send({"bye": True, "port": 1})
        each.close()
print("done", flush=True)
"""
)


@pytest.fixture
def lead(tmp_path, monkeypatch, capfd):
    """Runs a made-up launcher backend under `OneBackend`: exit code, what was said, and the run."""
    monkeypatch.setenv("MMM_LAUNCH_ADDRESS", "127.0.0.1")
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    def run(kind, start_timeout=PATIENCE, limits=None):
        plan = cluster.plan(
            Target("module", "x"),
            LaunchOptions(hosts="h0,h1", per_host=2, scheduler="none"),
            environ={"MASTER_ADDR": "h0"},
            version="HYDRA",
            build="cpu",
        )
        plan = dataclasses.replace(plan, command=[sys.executable, str(tmp_path / "launcher.py"), kind])
        made = Run(one_backend.OneBackend(plan, start_timeout), plan.ranks, limits)
        code = made.run()
        return code, capfd.readouterr(), made

    return run


def test_a_good_run(lead):
    code, said, made = lead("good")
    assert (code, said.out, said.err) == (0, "done\n", "")
    assert made.ended == {0, 1, 2, 3}


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
        ("lost", 1, "rank 3 on h1"),
        ("order", 7, "rank 2"),
        (
            "few",
            9,
            "exited with code 9 before the ranks could start: 4 of 4 processes that hydra was to start have not "
            "connected to launch; nothing was heard from h0, h1\n",
        ),
        ("world", 2, "(--launcher-args)"),
        ("twice", 2, "rank 0 on h0"),
        ("dies", 1, "launch: lost "),
    ],
)
def test_what_can_go_wrong(lead, kind, code, says):
    found, said, _ = lead(kind)
    assert found == code, said.err
    assert says in said.err
    assert said.err.count("launch: ") + said.err.count("error: ") == 1


def test_a_rendezvous_that_is_never_complete(lead, monkeypatch):
    join = one_backend.OneBackend.join

    def its_time_is_up_once_three_are_there(self, agent):
        join(self, agent)
        if len(self.agents) == 3:
            self.run.clocks.set(self.too_late, time.monotonic() + 0.2)

    monkeypatch.setattr(one_backend.OneBackend, "join", its_time_is_up_once_three_are_there)
    code, said, _ = lead("absent", start_timeout=PATIENCE)
    assert code == 1
    assert (
        f"launch: after {PATIENCE:g} s 1 of 4 processes that hydra was to start have not connected to launch\n"
        in said.err
    )


@pytest.mark.long
def test_all_are_there_and_none_says_a_word(lead, monkeypatch):
    monkeypatch.setattr(remote, "LOCATE", 0.2)
    monkeypatch.setattr(remote, "LAST_WORDS", 0.2)
    code, said, _ = lead("silent", limits=Limits(timeout=1.0))
    assert code == 124
    assert said.err == "launch: no output from any rank for 1 s (--timeout): ending 4 ranks\n"


def test_more_ranks_than_files(lead, monkeypatch):
    monkeypatch.setattr(one_backend, "open_files", lambda: 60)
    with pytest.raises(Exception, match="--ranks-by"):
        lead("good")


def test_where_launch_can_be_reached(monkeypatch):
    monkeypatch.delenv("MMM_LAUNCH_ADDRESS", raising=False)

    def at(names):
        return commands.addresses(
            cluster.plan(
                Target("module", "x"), LaunchOptions(hosts=names, per_host=1), environ={}, version="HYDRA", build="cpu"
            )
        )

    assert at("localhost") == ["127.0.0.1"]
    assert at(f"{os.uname().nodename},no-such-host-1")  # something, whatever the network here is like


@pytest.mark.parametrize(("own", "bound"), [(["127.0.0.1"], "127.0.0.1"), (["10.0.0.7", "127.0.0.1"], "0.0.0.0")])
def test_launch_listens_where_the_hosts_are(own, bound):
    """All of them here: on loopback alone."""
    made = one_backend.OneBackend.__new__(one_backend.OneBackend)
    made.token, made.run = "secret", SimpleNamespace(selector=selectors.DefaultSelector())
    made.listen(own, 2)
    host, port = made.reception.server.getsockname()
    assert (host, made.addresses) == (bound, [[address, port] for address in own])
    made.reception.close()
    made.run.selector.close()
