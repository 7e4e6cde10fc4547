"""The connection between `launch` and what it has started on each host: TCP, JSON objects.

    launch ◀ hello    go: what to run ▶    signal, kill ▶
           ◀ failure, ended: a rank's    ◀ interrupted: a signal that launch has not sent    ◀ bye
           ◀ saves: ranks save when somebody ends the run

Both ends have proven that they are of the run (`handshake`), and every message begins with its length and a MAC of its
place and content: what somebody else puts on the connection, leaves out or repeats ends it. Both ends have the kernel
ask whether the other is still there; an end that hears nothing for LOST_AFTER seconds counts as gone.
"""

import hashlib
import hmac
import json
import socket
from typing import Any

ADDRESS_VARIABLE = "MMM_LAUNCH_ADDRESS"  # launch's own address, where it cannot find out the right one
LOST_AFTER = 6  # s; detection, the ranks' grace and their end stay below 10 s
CONNECT_TIMEOUT = 10.0  # s for one address, and for its proof
SEND_TIMEOUT = 5.0  # s
CHUNK = 1 << 18
LONGEST = 1 << 24  # bytes of a message
LENGTH, MAC = 4, 32  # bytes
CLOSED = "its end was closed"
HEAD = LENGTH + MAC

Message = dict[str, Any]


class Lost(Exception):
    """The other end is gone; the message says how that was noticed."""


class Link:
    """One end of a connection.

    Args:
        send_key, receive_key: of the MACs of each direction, 32 bytes.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self.socket = connection
        self.send_key, self.receive_key = send_key, receive_key
        self.sent = self.received = 0  # messages
        self.buffer = bytearray()
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
        self.send_bytes(json.dumps(message).encode())

    def send_bytes(self, content: bytes) -> None:
        """Raises `Lost`."""
        try:
            self.socket.sendall(self._seal(content))
        except OSError as error:
            raise Lost(describe(error)) from None

    def read(self) -> list[Message]:
        """The messages that have come; waits for some of one. Raises `Lost`."""
        return [json.loads(content) for content in self.read_bytes()]

    def read_bytes(self) -> list[bytes]:
        """As `read`, of an end that uses `send_bytes`."""
        try:
            data = self.socket.recv(CHUNK)
        except OSError as error:
            raise Lost(describe(error)) from None
        if not data:
            raise Lost(CLOSED)
        self.buffer += data
        contents = []
        while len(self.buffer) >= LENGTH:
            size = HEAD + int.from_bytes(self.buffer[:LENGTH], "big")
            if size > LONGEST:
                raise Lost("somebody else wrote to the connection")
            if len(self.buffer) < size:
                break
            contents.append(self._open(bytes(self.buffer[LENGTH:HEAD]), bytes(self.buffer[HEAD:size])))
            del self.buffer[:size]
        return contents

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

    def _seal(self, content: bytes) -> bytes:
        mac = _mac(self.send_key, self.sent, content)
        self.sent += 1
        return len(content).to_bytes(LENGTH, "big") + mac + content

    def _open(self, mac: bytes, content: bytes) -> bytes:
        """Raises `Lost`: it is not from the other end, or not the next."""
        if not hmac.compare_digest(mac, _mac(self.receive_key, self.received, content)):
            raise Lost("somebody else wrote to the connection")
        self.received += 1
        return content


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=MAC, key=key, salt=number.to_bytes(16, "big")).digest()


def describe(error: OSError) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer"
    return f"no answer for {LOST_AFTER} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
