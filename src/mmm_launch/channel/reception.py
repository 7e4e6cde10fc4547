"""Where agents connect to launch: a listening socket, and connections that have not proven that they are of the run.

Nobody waits for a stranger. Each has `PROOF_TIMEOUT` for its first message. Where there are too many the oldest goes.
"""

import contextlib
import secrets
import selectors
import socket
import time

from mmm_launch.channel.link import CLOSED, LONGEST, NONCE, SEND_TIMEOUT, Lost, Message, SignedLink, key

# Seconds that a connection has to prove that it is of this run.
PROOF_TIMEOUT = 5.0
# How many connections without a proof are held, beyond the number of agents expected.
STRANGERS = 32
# The longest first message, in bytes: a stranger cannot make launch hold more.
LONGEST_HELLO = 1 << 14


class Stranger:
    """A connection that has not proven itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError: it has gone again."""
        self.socket = connection
        self.nonce = secrets.token_bytes(NONCE)
        self.theirs = b""
        self.link: SignedLink | None = None
        self.ends = time.monotonic() + PROOF_TIMEOUT
        connection.setblocking(False)
        # This cannot block: the send buffer of a new connection is empty.
        connection.sendall(self.nonce)

    def fileno(self) -> int:
        return self.socket.fileno()

    def hear(self, token: str) -> Message | None:
        """Take in what has come. Returns the first message, once it is there. Raises `Lost`, OSError."""
        if self.link is None:
            piece = self.socket.recv(NONCE - len(self.theirs))
            if not piece:
                raise Lost(CLOSED)
            self.theirs += piece
            if len(self.theirs) < NONCE:
                return None
            nonces = self.nonce + self.theirs
            self.link = SignedLink(self.socket, key(token, "launch", nonces), key(token, "agent", nonces))
            self.link.longest = LONGEST_HELLO
            self.socket.setblocking(False)
        self.link.receive()
        return self.link.take()


class Reception:
    """Takes agents in.

    Attributes:
        refused: number of connections that ended without a proof.
    """

    def __init__(self, server: socket.socket, token: str, selector: selectors.BaseSelector) -> None:
        self.server, self.token, self.selector = server, token, selector
        # By file descriptor. A dict keeps the order of insertion, so the oldest comes first.
        self.strangers: dict[int, Stranger] = {}
        self.refused = 0
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

    def deadline(self) -> float | None:
        """When the oldest stranger has to have proven itself, `time.monotonic()`."""
        for stranger in self.strangers.values():
            return stranger.ends
        return None

    def welcome(self, ready: set[int], expected: int) -> list[tuple[SignedLink, Message]]:
        """Take in what has come on the file descriptors `ready`.

        Args:
            expected: number of agents that are still to come.

        Returns:
            Connections that have proven to be of this run, with their first messages.
        """
        if self.server.fileno() in ready:
            self.accept(expected)
        proven: list[tuple[SignedLink, Message]] = []
        for descriptor in ready & self.strangers.keys():
            stranger = self.strangers[descriptor]
            try:
                hello = stranger.hear(self.token)
                if hello is not None and stranger.link is not None:
                    stranger.link.send({"welcome": True})
            except BlockingIOError:
                continue
            except (OSError, Lost):
                self.refuse(stranger)
                continue
            if hello is not None and stranger.link is not None:
                self.forget(stranger)
                stranger.link.longest = LONGEST
                stranger.socket.settimeout(SEND_TIMEOUT)
                proven.append((stranger.link, hello))
        now = time.monotonic()
        for stranger in list(self.strangers.values()):
            if now >= stranger.ends:
                self.refuse(stranger)
        return proven

    def accept(self, expected: int) -> None:
        # accept() raises BlockingIOError once nobody else is waiting.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                try:
                    stranger = Stranger(connection)
                except OSError:
                    connection.close()
                    continue
                if len(self.strangers) >= expected + STRANGERS:
                    self.refuse(next(iter(self.strangers.values())))
                self.strangers[stranger.fileno()] = stranger
                self.selector.register(stranger, selectors.EVENT_READ)

    def forget(self, stranger: Stranger) -> None:
        del self.strangers[stranger.fileno()]
        self.selector.unregister(stranger)

    def refuse(self, stranger: Stranger) -> None:
        self.refused += 1
        self.forget(stranger)
        stranger.socket.close()

    def close(self) -> None:
        for stranger in list(self.strangers.values()):
            self.refuse(stranger)
        self.selector.unregister(self.server)
        self.server.close()
