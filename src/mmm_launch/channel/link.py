"""A connection between two processes of a run. Messages are JSON objects, each after its length.

    launch ◀── socket pair ──▶ fork server                          this host's ranks: `Link`
    launch ◀── TCP ──▶ agent ◀── socket pair ──▶ fork server        ranks of another host: TCP is a `SignedLink`

An agent passes messages on as they are, so launch uses the same messages for every fork server:

    to the fork server    {"signal": number}               send it to every rank
                          {"end": number, "reason": text}  the same; ranks can read why
    to its agent          {"go": …}                        what to run; the first message
                          {"kill": true}                   end every process of the host's ranks at once
    from the fork server  {"started": true}                its imports are done, and ranks are being started
                          {"report": {…}, "ago": s}        a rank's own account of why it ends
                          {"ended": rank, "pid": …, "code": …}
    from the agent        {"hello": {…}}                   the first message
                          {"refused": text}                this host can start no ranks
                          {"interrupted": number}          a signal that launch has not sent
                          {"gone": code}                   the fork server has ended; the last message

The clocks of two hosts differ, so "ago" says how many seconds ago something happened.

Both ends of a TCP connection first send 32 random bytes. From these and the run's token each end derives the two keys
of the MACs (message authentication codes), one for each direction. A MAC covers the number of its message too. So the
first message proves who has sent it, and the connection ends as soon as somebody else inserts, drops or repeats a
message. The token itself never goes over the network.
"""

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

# A host that has shown no sign of life for this many seconds counts as gone.
LOST_AFTER = 6
# Seconds that sending one message may take.
SEND_TIMEOUT = 5.0
CHUNK = 1 << 18
# Bytes in front of each message that say how long it is.
LENGTH = 4
# The longest message, in bytes.
LONGEST = 1 << 24
# Bytes of a message's MAC, and of the random nonce that each end sends first.
MAC = 32
NONCE = 32
CLOSED = "its end was closed"
FOREIGN = "somebody else wrote to the connection"

Message = dict[str, Any]


class Lost(Exception):
    """The other end is gone. The message says how that was noticed."""


class Link:
    """One end of a connection that nobody else can reach.

    Attributes:
        socket: the connection.
        buffer: bytes that were received, and do not make up a whole message yet.
        longest: the most bytes that a message may have.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.buffer = bytearray()
        self.longest = LONGEST
        connection.settimeout(SEND_TIMEOUT)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message. Raises `Lost`."""
        content = self.seal(json.dumps(message).encode())
        try:
            self.socket.sendall(len(content).to_bytes(LENGTH, "big") + content)
        except OSError as error:
            raise Lost(describe(error)) from None

    def read(self) -> list[Message]:
        """Wait for some bytes, and return the messages that are whole with them. Raises `Lost`."""
        self.receive()
        return self.complete()

    def first(self, timeout: float | None) -> Message:
        """Wait for one message and return it. `complete` returns others that came with it. Raises `Lost`."""
        self.socket.settimeout(timeout)
        try:
            message = self.take()
            while message is None:
                self.receive()
                message = self.take()
            return message
        finally:
            self.socket.settimeout(SEND_TIMEOUT)

    def receive(self) -> None:
        """Wait for some bytes. Raises `Lost`."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise Lost(describe(error)) from None
        if not data:
            raise Lost(CLOSED)
        self.buffer += data

    def complete(self) -> list[Message]:
        """Return the messages that have been received as a whole. Raises `Lost`."""
        messages: list[Message] = []
        message = self.take()
        while message is not None:
            messages.append(message)
            message = self.take()
        return messages

    def take(self) -> Message | None:
        """Take the next message out of the buffer. None: it is not there as a whole yet. Raises `Lost`."""
        if len(self.buffer) < LENGTH:
            return None
        end = LENGTH + int.from_bytes(self.buffer[:LENGTH], "big")
        # Checked before waiting for the rest: a stranger could announce 4 GB and fill the memory.
        if end > self.longest:
            raise Lost(FOREIGN)
        if len(self.buffer) < end:
            return None
        content = self.open(bytes(self.buffer[LENGTH:end]))
        del self.buffer[:end]
        return json.loads(content)

    def seal(self, content: bytes) -> bytes:
        """Return the bytes that are sent for `content`."""
        return content

    def open(self, sealed: bytes) -> bytes:
        """Undo `seal`. Raises `Lost`: the bytes are not from the other end, or not its next message."""
        return sealed

    def close(self) -> None:
        self.socket.close()


class SignedLink(Link):
    """One end of a TCP connection, with a MAC for each message.

    Args:
        connection: the connected socket.
        send_key: key of the MACs of messages that are sent, 32 bytes.
        receive_key: key of the MACs of messages that are received, 32 bytes.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        super().__init__(connection)
        self.send_key = send_key
        self.receive_key = receive_key
        self.sent = 0
        self.received = 0
        # Messages are small and rare: send each at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that loses its power closes no connection. The kernel asks it once a second after some quiet.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        quiet = LOST_AFTER // 3
        options = {
            "TCP_KEEPIDLE": quiet,
            "TCP_KEEPINTVL": 1,
            "TCP_KEEPCNT": LOST_AFTER - quiet,
            # Keepalive probes only a quiet connection; this one bounds unacknowledged data too.
            "TCP_USER_TIMEOUT": 1000 * LOST_AFTER,
        }
        for name, value in options.items():
            # Only Linux has all of these options.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def seal(self, content: bytes) -> bytes:
        sealed = _mac(self.send_key, self.sent, content) + content
        self.sent += 1
        return sealed

    def open(self, sealed: bytes) -> bytes:
        content = sealed[MAC:]
        if not hmac.compare_digest(sealed[:MAC], _mac(self.receive_key, self.received, content)):
            raise Lost(FOREIGN)
        self.received += 1
        return content


def _mac(key: bytes, message_index: int, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=MAC, key=key, salt=message_index.to_bytes(16, "big")).digest()


def key(token: str, sender: str, nonces: bytes) -> bytes:
    """Derive the key for the messages of one direction.

    Args:
        token: the run's secret.
        sender: who sends them, "launch" or "agent".
        nonces: launch's random bytes, then the agent's.
    """
    return hmac.new(token.encode(), sender.encode() + nonces, hashlib.sha256).digest()


def connect(address: tuple[str, int], token: str, hello: Message, timeout: float) -> SignedLink:
    """Connect an agent to launch, and have both prove that they are of this run.

    Args:
        address: host name or address of launch, and its port.
        token: the run's secret.
        hello: the first message to launch.
        timeout: seconds for connecting, and again for the proofs.

    Raises:
        OSError: nobody answers at the address.
        Lost: somebody else answers there.
    """
    connection = socket.create_connection(address, timeout=timeout)
    try:
        # All of the exchange shares one deadline: a stranger may send its bytes one by one.
        ends = time.monotonic() + timeout
        own = secrets.token_bytes(NONCE)
        connection.sendall(own)
        theirs = b""
        while len(theirs) < NONCE:
            connection.settimeout(max(0.01, ends - time.monotonic()))
            piece = connection.recv(NONCE - len(theirs))
            if not piece:
                raise Lost(CLOSED)
            theirs += piece
        nonces = theirs + own
        link = SignedLink(connection, key(token, "agent", nonces), key(token, "launch", nonces))
        link.send({"hello": hello})
        # Only launch can make the MAC of this first message: it proves that launch is at the other end.
        link.first(max(0.01, ends - time.monotonic()))
        return link
    except (OSError, Lost):
        connection.close()
        raise


def describe(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        if not error.errno:
            return "no answer"
        return f"no answer for {LOST_AFTER} s"
    return error.strerror or str(error)
