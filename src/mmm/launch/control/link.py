"""The connection between `launch` and what it has started on each host: TCP, one JSON object a line.

    launch ── nonce ▶    ◀ hello, signed with the token    go: what to run ▶    signal, kill ▶
           ◀ failure, ended: a rank's    ◀ interrupted: a signal that launch has not sent    ◀ bye

The token is in the environment of the processes that launch starts, and never on the network. Both ends have the kernel
ask whether the other is still there; an end that hears nothing for LOST_AFTER seconds counts as gone.
"""

import hashlib
import hmac
import json
import socket
from typing import Any

ADDRESS_VARIABLE = "MMM_LAUNCH_ADDRESS"  # launch's own address, where it cannot find out the right one
LOST_AFTER = 6  # s; detection, the ranks' grace and their end stay below 10 s
CONNECT_TIMEOUT = 10.0  # s for one address
SEND_TIMEOUT = 5.0  # s
CHUNK = 1 << 16
LONGEST = 1 << 24  # bytes of a message

Message = dict[str, Any]


class Lost(Exception):
    """The other end is gone; the message says how that was noticed."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.buffer = b""
        self.early: list[Message] = []  # what came together with what `one` has returned
        connection.settimeout(SEND_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        quiet = LOST_AFTER // 3
        for name, value in (
            ("TCP_KEEPIDLE", quiet),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", LOST_AFTER - quiet),
            ("TCP_USER_TIMEOUT", 1000 * LOST_AFTER),
        ):
            if hasattr(socket, name):  # Linux; the last one also counts while something is being sent
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Raises `Lost`."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(_reason(error)) from None

    def read(self) -> list[Message]:
        """The messages that have come; waits for some of one. Raises `Lost`."""
        try:
            data = self.socket.recv(CHUNK)
        except OSError as error:
            raise Lost(_reason(error)) from None
        if not data:
            raise Lost("its end was closed")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if len(self.buffer) > LONGEST:
            raise Lost("it sent what is no message")
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            raise Lost("it sent what is no message") from None

    def one(self, timeout: float | None) -> Message:
        """The first message in `early`, or else wait for one; others that come with it are put there. Raises `Lost`."""
        if self.early:
            return self.early.pop(0)
        self.socket.settimeout(timeout)
        try:
            while not (messages := self.read()):
                pass
            self.early += messages[1:]
            return messages[0]
        finally:
            self.socket.settimeout(SEND_TIMEOUT)

    def close(self) -> None:
        self.socket.close()


def sign(token: str, nonce: str, words: str) -> str:
    """Shows that the sender of `words` knows `token`."""
    return hmac.new(token.encode(), f"{nonce} {words}".encode(), hashlib.sha256).hexdigest()


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one, other)


def reach(addresses: list[list[Any]], token: str, hello: Message) -> Link:
    """Connect to launch at the first of `addresses` that is its own, and say hello.

    Raises:
        Lost: none of them answers.
    """
    tried = []
    for host, port in addresses:
        try:
            link = Link(socket.create_connection((host, port), timeout=CONNECT_TIMEOUT))
            nonce = str(link.one(CONNECT_TIMEOUT).get("nonce"))
        except OSError as error:
            tried.append(f"{host}:{port}: {_reason(error)}")
            continue
        except Lost as error:
            tried.append(f"{host}:{port}: {error}")
            continue
        words = json.dumps(hello)
        link.send({"hello": words, "signed": sign(token, nonce, words)})
        return link
    raise Lost("; ".join(tried))


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer"
    return f"no answer for {LOST_AFTER} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
