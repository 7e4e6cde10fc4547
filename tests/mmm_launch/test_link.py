"""launch's connections to its hosts: both ends prove that they are of the run, and nobody else's bytes are taken for a
message; a made-up mpiexec, whose one process connects in the place of many, goes wrong in every way."""

import contextlib
import dataclasses
import os
import selectors
import socket
import sys
import threading
import time

import pytest

from mmm_launch.channel import reception as receptions
from mmm_launch.channel.link import Lost, connect
from mmm_launch.channel.reception import PROOF_TIMEOUT, STRANGERS, Reception
from mmm_launch.errors import LaunchError
from mmm_launch.host import agent
from mmm_launch.program.target import Target
from mmm_launch.run import backend
from mmm_launch.run.control import Run
from mmm_launch.spec.options import LaunchOptions
from mmm_launch.spec.plan import plan
from support.clock import PATIENCE, stretched

TOKEN = "secret"
HELLO = {"host": "h0"}
FOREIGN = "somebody else wrote to the connection"


def reach(addresses, timeout=10.0):
    agent.CONNECT_TIMEOUT = timeout
    return agent.reach(addresses, TOKEN, HELLO)


@pytest.fixture
def reception():
    with selectors.DefaultSelector() as selector:
        made = Reception(socket.create_server(("127.0.0.1", 0)), TOKEN, selector)
        yield made
        made.close()


def welcomed(reception, expected=1, until=lambda links: links, seconds=60.0):
    """Those that have proven themselves, served as launch does, with what they say first."""
    links = []
    ends = time.monotonic() + seconds
    while not until(links) and time.monotonic() < ends:
        ready = reception.selector.select(0.05)
        links += reception.welcome({key.fd for key, _ in ready}, expected)
    return links


def pair(reception):
    """Two ends that have proven themselves to each other: who connected, and who answered."""
    ends = []
    address = reception.server.getsockname()
    thread = threading.Thread(target=lambda: ends.append(connect(address, TOKEN, HELLO, 10.0)))
    thread.start()
    ((answerer, message),) = welcomed(reception)
    thread.join()
    assert message == {"hello": HELLO}
    return ends[0], answerer


def test_who_answers_without_the_token_is_not_believed():
    """Somebody has taken the port of a launch that is gone, and would have its ranks started."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            connection.sendall(bytes(32))
            connection.recv(32)
            hello = connection.recv(10_000)
            # The only proof that it has seen.
            connection.sendall(hello)
            connection.sendall(b'{"go": {"shared": {"PYTHONPATH": "/tmp/planted"}}}')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Lost, match="it is not of this run"):
            reach([list(impostor.getsockname())], 5.0)
        thread.join()


def test_who_connects_without_the_token_is_refused(reception):
    with socket.create_connection(reception.server.getsockname()) as stranger:
        # A challenge, and no proof.
        stranger.sendall(bytes(200))
        assert welcomed(reception, until=lambda links: links or reception.refused) == []
    assert reception.refused == 1


def test_an_address_that_refuses_at_first_is_tried_again(reception, monkeypatch):
    tries, real = [], socket.create_connection

    def refused_twice(*args, **named):
        tries.append(args)
        if len(tries) < 3:
            raise ConnectionRefusedError(111, "Connection refused")
        return real(*args, **named)

    monkeypatch.setattr(socket, "create_connection", refused_twice)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(reach([list(reception.server.getsockname())])))
    thread.start()
    assert len(welcomed(reception)) == 1
    thread.join()
    assert (len(ends), len(tries)) == (1, 3)


def test_the_first_address_that_is_of_the_run(reception, monkeypatch):
    monkeypatch.setattr(agent, "AGAIN", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = list(closed.getsockname())
    with pytest.raises(Lost, match=f"127.0.0.1:{nobody[1]}: Connection refused"):
        reach([nobody], 5.0)
    ends = []
    addresses = [nobody, list(reception.server.getsockname())]
    thread = threading.Thread(target=lambda: ends.append(reach(addresses)))
    thread.start()
    assert len(welcomed(reception)) == 1
    thread.join()
    assert len(ends) == 1


def test_a_silent_address_costs_its_time_alone(monkeypatch):
    monkeypatch.setattr(agent, "AGAIN", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(Lost, match="no answer"):
            reach([list(silent.getsockname())], 0.2)
        assert time.monotonic() - began < stretched(5)


def slowly(connection):
    connection.recv(32)
    # It has been sent away.
    with contextlib.suppress(OSError):
        for _ in range(20):
            connection.sendall(b"x")
            time.sleep(0.02)


@pytest.mark.parametrize("stranger", [lambda connection: None, slowly])
def test_a_stranger_has_its_time_and_no_more(reception, monkeypatch, stranger):
    monkeypatch.setattr(receptions, "PROOF_TIMEOUT", 0.2)
    with socket.create_connection(reception.server.getsockname()) as connection:
        thread = threading.Thread(target=stranger, args=(connection,))
        thread.start()
        began = time.monotonic()
        assert welcomed(reception, until=lambda _: reception.refused) == []
        assert time.monotonic() - began < stretched(PROOF_TIMEOUT)
        thread.join()
    assert not reception.strangers


def test_strangers_do_not_keep_others_out(reception):
    """More than are allowed to wait: the oldest go, and who knows the token comes in."""
    address = reception.server.getsockname()
    strangers = [socket.create_connection(address) for _ in range(STRANGERS + 20)]
    _, answerer = pair(reception)
    assert answerer is not None
    assert len(reception.strangers) <= STRANGERS + 1
    for stranger in strangers:
        stranger.close()


def sealed(link, content):
    """A message as it is sent."""
    with_mac = link.seal(content)
    return len(with_mac).to_bytes(4, "big") + with_mac


@pytest.mark.parametrize(
    "bytes_of",
    [
        # Without a MAC
        lambda line: b'\0\0\0\x0d{"signal": 9}',
        # changed
        lambda line: line.replace(b": 15", b": 09"),
        # twice
        lambda line: line + line,
        lambda line: b"\xff\xfe" + line,
        lambda line: b"[" * 100_000,
    ],
)
def test_what_another_puts_on_the_connection_ends_it(reception, bytes_of):
    one, other = pair(reception)
    other.socket.sendall(bytes_of(sealed(other, b'{"signal": 15}')))
    with pytest.raises(Lost, match=FOREIGN):
        list(iter(lambda: one.first(5.0), None))


def test_a_message_cannot_be_left_out(reception):
    one, other = pair(reception)
    other.seal(b'{"first": 1}')
    other.send({"second": 2})
    with pytest.raises(Lost, match=FOREIGN):
        one.first(5.0)


def test_messages_that_come_together_and_one_that_is_sent_back(reception):
    one, other = pair(reception)
    other.socket.sendall(sealed(other, b'{"go": 1}') + sealed(other, b'{"signal": 10}'))
    assert one.first(5.0) == {"go": 1}
    assert one.complete() == [{"signal": 10}]
    other.socket.sendall(sealed(other, b'{"go": 2}'))
    one.socket.sendall(one.socket.recv(1000))
    # Each direction has a key of its own.
    with pytest.raises(Lost, match=FOREIGN):
        other.first(5.0)


# What somebody sends to launch's port who is not of the run.
SENT = {
    "wrong proof": bytes(64),
    "idle": b"",
    "many": b"",
    "text": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64,
    "not ascii": b'{"hello": "{}", "signed": "\xc3\xa9"}\n' + b" " * 64,
    "surrogate": b'{"hello": "\\ud800", "signed": "00"}\n' + b" " * 64,
    "deep": b"[" * 100_000 + b"\n",
}
# Stands for mpiexec: it reaches launch as agents do, and goes wrong in the way that its argument names.
LAUNCHER = (
    f"""
SENT = {SENT!r}
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
if kind in SENT:
    strangers = [socket.create_connection(tuple(entry["at"][0])) for _ in range(100 if kind == "many" else 1)]
    strangers[0].sendall(SENT[kind])
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
    # At once: launch waits for the second a moment, in which a busy machine may do other things.
    said = [failure(1, 5, 0.0, "rank 1 came second"), failure(0, 7, 3.0, "rank 0 came first")]
    sealed = [links[1].seal(json.dumps(each).encode()) for each in said]
    links[1].socket.sendall(b"".join(len(each).to_bytes(4, "big") + each for each in sealed))
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
        # Those that sleep say nothing more.
        if kind in ("more", "twice", "absent", "mute"):
            monkeypatch.setattr(backend, "LAST_WORDS", 0.2)
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


@pytest.mark.parametrize("kind", SENT)
def test_a_stranger_costs_the_run_nothing(lead, kind):
    """Whatever it sends, or does not: it is sent away, is told nothing, and the run ends as it would without it."""
    code, messages, made = lead(kind)
    assert (code, messages.out) == (0, "done\n")
    assert messages.err in ("", "launch: a connection without this run's token was refused\n")
    assert made.ended == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("lost", 1, "ranks 2, 3 on h1"),
        ("order", 7, "rank 0 came first"),
        (
            "few",
            9,
            "exited with code 9 before the ranks could start: 2 of 2 processes that hydra was to start have not ",
        ),
        ("more", 2, "(--launcher-args)"),
        ("twice", 2, "process 0 on h0"),
        ("dies", 1, "launch: lost "),
    ],
)
def test_what_can_go_wrong(lead, kind, code, says):
    result, messages, _ = lead(kind)
    assert result == code, messages.err
    assert says in messages.err
    assert messages.err.count("launch: ") + messages.err.count("error: ") == (kind != "order")


def test_a_start_that_is_never_complete(lead, monkeypatch):
    join = backend.Backend.join

    def its_time_is_up_once_one_is_there(self, host, error):
        join(self, host, error)
        self.run.clocks.set(self.too_late, time.monotonic() + 0.2)

    monkeypatch.setattr(backend.Backend, "join", its_time_is_up_once_one_is_there)
    code, messages, made = lead("absent")
    assert code == 1
    assert "1 of 2 processes that hydra was to start have not connected to launch" in messages.err
    assert made.transport.silent_hosts == ("h1",)


@pytest.mark.long
def test_all_are_there_and_none_says_a_word(lead):
    code, messages, _ = lead("mute", timeout=1.0)
    assert code == 124
    assert messages.err == "launch: no output from any rank for 1 s (--timeout): ending 4 ranks\n"


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
    # something, whatever the network here is like
    assert at(f"{os.uname().nodename},no-such-host-1")


@pytest.mark.parametrize(("own", "bound"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "0.0.0.0")])
def test_launch_listens_where_the_hosts_are(lead, monkeypatch, own, bound):
    """All of them here: on loopback alone."""
    results = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: results.append(create(*a, **k)) or results[-1])
    monkeypatch.setenv("MMM_LAUNCH_ADDRESS", own)
    monkeypatch.setattr(backend.Backend, "welcome", lambda self, ready: bound_to.append(results[0].getsockname()[0]))
    bound_to = []
    lead("few")
    assert bound_to[0] == bound
