"""Who connects proves that it is of this run, and so does who was connected to, before either reads a message.

    launch, or a host that serves others          an agent, or a host that is served
      challenge, 32 random bytes        ────▶
                                        ◀────     challenge, 32 random bytes; proof, 32 bytes
      proof, 32 bytes                   ────▶

A proof is an HMAC-SHA256 of the side and both challenges, keyed with the run's token, which is never on the network.
Sizes are fixed, so nothing that a stranger sends is parsed. The same secret gives each direction a key for what follows
(`link`). The protocol is that of Python's `multiprocessing.connection`, with both challenges in each proof.
"""

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from typing import Any

from mmm_launch.channel.link import CLOSED, Link, Lost, describe

PROOF_TIMEOUT = 5.0  # s that a connection has to prove that it is of this run
STRANGERS = 32  # connections without a proof, beyond those that are expected
AGAIN = 3.0  # s in which an address is tried again
SIZE = 32  # bytes of a challenge, and of a proof


def _keyed(token: str, purpose: str, challenges: bytes) -> bytes:
    return hmac.new(token.encode(), purpose.encode() + challenges, hashlib.sha256).digest()


def connect(address: tuple[str, int], token: str, timeout: float) -> Link:
    """Connect, prove ourselves, and have the other side prove itself.

    Args:
        timeout: s for each of connecting and the whole exchange.

    Raises:
        OSError, Lost: nobody answers there, or somebody else.
    """
    connection = socket.create_connection(address, timeout=timeout)
    try:
        ends = time.monotonic() + timeout
        theirs, ours = _receive(connection, SIZE, ends), secrets.token_bytes(SIZE)
        challenges = theirs + ours
        connection.sendall(ours + _keyed(token, "connects", challenges))
        if not hmac.compare_digest(_receive(connection, SIZE, ends), _keyed(token, "answers", challenges)):
            raise Lost("it is not of this run")
    except (OSError, Lost):
        connection.close()
        raise
    return Link(connection, _keyed(token, "to answerer", challenges), _keyed(token, "to connector", challenges))


def _receive(connection: socket.socket, size: int, ends: float) -> bytes:
    """Just `size` bytes, by `ends`. Raises `OSError`, `Lost`."""
    received = b""
    while len(received) < size:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(size - len(received))
        if not piece:
            raise Lost(CLOSED)
        received += piece
    return received


class Stranger:
    """A connection that has not proven yet that it is of this run. Nothing here waits for it."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        """Raises `OSError`."""
        self.socket, self.challenge = connection, secrets.token_bytes(SIZE)
        self.received, self.ends = b"", now + PROOF_TIMEOUT
        connection.setblocking(False)
        connection.sendall(self.challenge)  # an empty socket has room for it

    def fileno(self) -> int:
        return self.socket.fileno()

    def hear(self, token: str) -> Link | None:
        """Take in what has come: the connection, once it has proven itself. Raises `OSError`, `Lost`."""
        piece = self.socket.recv(2 * SIZE - len(self.received))
        if not piece:
            raise Lost(CLOSED)
        self.received += piece
        if len(self.received) < 2 * SIZE:
            return None
        challenges = self.challenge + self.received[:SIZE]
        if not hmac.compare_digest(self.received[SIZE:], _keyed(token, "connects", challenges)):
            raise Lost("it is not of this run")
        self.socket.sendall(_keyed(token, "answers", challenges))
        return Link(self.socket, _keyed(token, "to connector", challenges), _keyed(token, "to answerer", challenges))


class Reception:
    """A listening socket, and the connections to it that have not proven themselves yet.

    They hold nobody up: each has `PROOF_TIMEOUT`, and where there are too many the oldest goes.

    Attributes:
        refused: connections that ended without a proof.
    """

    def __init__(self, server: socket.socket, token: str, selector: selectors.BaseSelector) -> None:
        self.server, self.token, self.selector = server, token, selector
        self.strangers: dict[int, Stranger] = {}  # by file descriptor, the oldest first
        self.refused = 0
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

    def deadline(self) -> float | None:
        """When the oldest has to have proven itself, `time.monotonic()`."""
        return next((stranger.ends for stranger in self.strangers.values()), None)

    def welcome(self, ready: set[int], expected: int) -> list[Link]:
        """Take in what has come on the descriptors `ready`: who has proven to be of this run.

        Args:
            expected: how many such connections are still to come.
        """
        if self.server.fileno() in ready:
            self._accept(expected)
        links = []
        for fd in ready & self.strangers.keys():
            try:
                link = self.strangers[fd].hear(self.token)
            except BlockingIOError:
                continue
            except (OSError, Lost):
                self._refuse(self.strangers[fd])
                continue
            if link is not None:
                self._forget(fd)
                links.append(link)
        now = time.monotonic()
        for stranger in [stranger for stranger in self.strangers.values() if now >= stranger.ends]:
            self._refuse(stranger)
        return links

    def _accept(self, expected: int) -> None:
        with contextlib.suppress(OSError):  # no more, or it has gone again
            while True:
                connection, _ = self.server.accept()
                try:
                    stranger = Stranger(connection, time.monotonic())
                except OSError:
                    connection.close()
                    continue
                if len(self.strangers) >= expected + STRANGERS:
                    self._refuse(next(iter(self.strangers.values())))
                self.strangers[stranger.fileno()] = stranger
                self.selector.register(stranger, selectors.EVENT_READ)

    def _forget(self, fd: int) -> None:
        self.selector.unregister(self.strangers.pop(fd))

    def _refuse(self, stranger: Stranger) -> None:
        self.refused += 1
        self._forget(stranger.fileno())
        stranger.socket.close()

    def close(self) -> None:
        for stranger in list(self.strangers.values()):
            self._forget(stranger.fileno())
            stranger.socket.close()
        self.selector.unregister(self.server)
        self.server.close()


def reach(addresses: list[list[Any]], token: str, timeout: float) -> Link:
    """Connect to this run at the first of `addresses` where it answers.

    Those that nobody answers at are tried again for `AGAIN` seconds: a name server or a network may fail for a moment.

    Raises:
        Lost: at none.
    """
    tried: dict[str, str] = {}
    until = time.monotonic() + AGAIN
    while True:
        silent = False
        for host, port in addresses:
            try:
                return connect((host, port), token, timeout)
            except OSError as error:
                tried[f"{host}:{port}"], silent = describe(error), True
            except Lost as error:
                tried[f"{host}:{port}"] = str(error)
        if not silent or time.monotonic() > until:
            raise Lost("; ".join(f"{where}: {why}" for where, why in tried.items()))
        time.sleep(0.2)
