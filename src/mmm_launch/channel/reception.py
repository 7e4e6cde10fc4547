"""Takes connections of agents to launch, and checks that they are of this run.

A stranger is a connection that has not proven this yet. It has `PROOF_TIMEOUT` seconds for its first message, and
launch never waits for it: anybody on the network may connect. If there are too many strangers, the oldest has to go.
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
    """A connection that has not proven yet that it is of this run.

    Attributes:
        nonce: the random bytes that launch has sent.
        theirs: the random bytes that have come from the other end so far.
        link: the connection with its keys, once all of `theirs` have come.
        ends: when the proof has to be there, by `time.monotonic()`.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Send launch's nonce. Raises OSError: the connection is closed already."""
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
        """Read what has come. Returns the first message, once all of it has. Raises `Lost`, OSError."""
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
        server: the listening socket.
        token: the run's secret.
        selector: launch's; strangers are registered with it.
        strangers: connections without a proof.
        refused: number of connections that ended without a proof.
    """

    def __init__(self, server: socket.socket, token: str, selector: selectors.BaseSelector) -> None:
        self.server = server
        self.token = token
        self.selector = selector
        # By file descriptor. A dict keeps the order of insertion, so the oldest comes first.
        self.strangers: dict[int, Stranger] = {}
        self.refused = 0
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

    def deadline(self) -> float | None:
        """Return until when the oldest stranger has to prove itself, by `time.monotonic()`. None: there is none."""
        for stranger in self.strangers.values():
            return stranger.ends
        return None

    def welcome(self, ready: set[int], expected: int) -> list[tuple[SignedLink, Message]]:
        """Read from the file descriptors in `ready` that belong to strangers, or to the listening socket.

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
                # The agent checks the MAC of this answer: so launch, too, has proven itself.
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
                # Each stranger holds a file descriptor, of which launch has a limited number.
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
