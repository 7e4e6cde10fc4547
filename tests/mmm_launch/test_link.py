"""Both ends of a connection prove that they are of the run, and nobody else's bytes are taken for a message."""

import contextlib
import selectors
import socket
import threading
import time

import pytest

from mmm_launch.channel import reception as receptions
from mmm_launch.channel.link import Lost, connect
from mmm_launch.channel.reception import PROOF_TIMEOUT, STRANGERS, Reception
from mmm_launch.host import agent

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


def welcomed(reception, expected=1, until=lambda links: links, seconds=10.0):
    """Those that have proven themselves, served as launch does, with what they say first."""
    links, ends = [], time.monotonic() + seconds
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
            connection.sendall(hello)  # the only proof that it has seen
            connection.sendall(b'{"go": {"shared": {"PYTHONPATH": "/tmp/planted"}}}')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Lost, match="it is not of this run"):
            reach([list(impostor.getsockname())], 5.0)
        thread.join()


def test_who_connects_without_the_token_is_refused(reception):
    with socket.create_connection(reception.server.getsockname()) as stranger:
        stranger.sendall(bytes(200))  # a challenge, and no proof
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
    at = [nobody, list(reception.server.getsockname())]
    thread = threading.Thread(target=lambda: ends.append(reach(at)))
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
        assert time.monotonic() - began < 5


def slowly(connection):
    connection.recv(32)
    with contextlib.suppress(OSError):  # it has been sent away
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
        assert time.monotonic() - began < PROOF_TIMEOUT
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
        lambda line: b'\0\0\0\x0d{"signal": 9}',  # without a MAC
        lambda line: line.replace(b": 15", b": 09"),  # changed
        lambda line: line + line,  # twice
        lambda line: b"\xff\xfe" + line,
        lambda line: b"[" * 100_000,
    ],
)
def test_what_another_puts_on_the_connection_ends_it(reception, bytes_of):
    one, other = pair(reception)
    other.socket.sendall(bytes_of(sealed(other, b'{"signal": 15}')))
    with pytest.raises(Lost, match=FOREIGN):
        until_lost(one)


def until_lost(link):
    while link.first(5.0):
        pass


def test_a_message_cannot_be_left_out(reception):
    one, other = pair(reception)
    other.seal(b'{"first": 1}')
    other.send({"second": 2})
    with pytest.raises(Lost, match=FOREIGN):
        one.first(5.0)


def test_a_message_that_was_sent_is_not_taken_back(reception):
    """Each direction has a key of its own."""
    one, other = pair(reception)
    other.socket.sendall(sealed(other, b'{"go": 1}'))
    line = one.socket.recv(1000)
    one.socket.sendall(line)
    with pytest.raises(Lost, match=FOREIGN):
        other.first(5.0)


def test_messages_that_come_together(reception):
    one, other = pair(reception)
    other.socket.sendall(sealed(other, b'{"go": 1}') + sealed(other, b'{"signal": 10}'))
    assert one.first(5.0) == {"go": 1}
    assert one.complete() == [{"signal": 10}]
