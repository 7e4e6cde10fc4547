"""A host's part in `launch --stage`: it gets the copy from one host, and passes it on to others while it unpacks it.

    first host ── tar ─▶ two others ─▶ two more each ─▶ …       launch says who gets it from whom (`control/staging.py`)

The data goes from host to host, in frames that are signed with the run's token, which is never on the network: what
was not sent by this run is not unpacked. It is not encrypted. Long steps run in a process of their own, which is killed
when launch ends or is gone.
"""

import hashlib
import json
import os
import queue
import select
import selectors
import signal
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any

from mmm.contract import ENDING
from mmm.errors import LaunchError
from mmm.launch.control.failures import say
from mmm.launch.control.handshake import Reception, reach
from mmm.launch.control.link import CONNECT_TIMEOUT, Link, Lost
from mmm.launch.host import copies, lifeline
from mmm.launch.host.copies import Copy, Source
from mmm.launch.job.staging import Stage

AHEAD = 16  # frames that wait for a host that is slower than others
SIGNATURE = 16  # bytes
FAILURES = (OSError, EOFError, tarfile.TarError, LaunchError)


@contextmanager
def on_this_host(stage: Stage) -> Iterator[str]:
    """The path of this host's copy, made if it is not there. Raises `LaunchError`."""
    began = time.monotonic()
    try:
        with ending_raises():
            copy = Copy(copies.scan(stage.source), stage.to)
            copy.own_folder()
            if not copy.there():
                copy.make_room()
                with made_or_discarded(copy), copy.unpacking() as feed:
                    copies.pack(copy.source, feed)
    except FAILURES as error:
        raise LaunchError(f"--stage {stage.source}: {in_words(error)}") from None
    source = copy.source
    say(stage.done(f"this host, in {copy.path}", source.files, source.size, time.monotonic() - began))
    try:
        yield str(copy.path)
    finally:
        if not stage.keep:
            copy.remove()


class Stager:
    """Does for its host what launch asks for over `link`, step by step."""

    def __init__(self, link: Link, token: str) -> None:
        self.link, self.token = link, token
        self.copy: Copy | None = None
        self.keep = False
        self.server: socket.socket | None = None

    def answer(self, ask: dict[str, Any]) -> bool:
        """Do one step and say what came of it. False: this process, or the run, is to end. Raises `Lost`."""
        step: Callable[..., dict[str, Any]] = getattr(self, ask.pop("do"))
        try:
            with ending_raises():
                said = step(**ask)
        except FAILURES as error:
            said = {"error": in_words(error), "doubt": 2 if isinstance(error, EOFError) else 0}
        except SystemExit:
            return False
        self.link.send({"stage": said})
        return True

    def farewell(self, link: Link | None) -> None:
        """This host's ranks are over: wait until those of its other processes are, and remove the copy."""
        for number in ENDING:  # this process ends in any case, and that is all that it has left to do
            signal.signal(number, signal.SIG_IGN)
        keep = self.keep
        with suppress(Lost):
            while link is not None:
                message = link.one(None)
                if "remove" in message:
                    keep, link = not message["remove"], None
        if self.copy is not None and not keep:
            self.copy.remove()

    def scan(self, path: str) -> dict[str, Any]:
        return self.apart(lambda: asdict(copies.scan(path)))

    def prepare(self, source: dict[str, Any], folder: str | None, keep: bool, listen_at: str) -> dict[str, Any]:
        """The copy, if it is there; else a port at which other hosts can ask for it. listen_at: "": any address."""
        copy, self.keep = Copy(Source(**source), folder), keep
        copy.own_folder()
        self.copy = copy
        if copy.there():
            return {"copy": str(copy.path), "port": self.listen(listen_at)}
        self.apart(copy.make_room)
        return {"port": self.listen(listen_at)}

    def transfer(self, parent: list[list[Any]] | None, children: int, unpack: bool) -> dict[str, Any]:
        """Get the copy from the first address of `parent` that answers (None: from its source), for others too."""
        copy = self.copy
        assert copy is not None
        assert self.server is not None
        with closing(self.server), made_or_discarded(copy):
            self.apart(lambda: self.relay(copy, parent, children, unpack))
        return {"copy": str(copy.path)}

    def listen(self, address: str) -> int:
        self.server = socket.create_server((address, 0))
        return int(self.server.getsockname()[1])

    def relay(self, copy: Copy, parent: list[list[Any]] | None, children: int, unpack: bool) -> None:
        with ExitStack() as stack:
            others = [Served(stack.enter_context(closing(other))) for other in self.accept(children)]
            source = stack.enter_context(closing(_reach(parent, self.token))) if parent is not None else None
            feed = stack.enter_context(copy.unpacking()) if unpack else lambda piece: None
            signer = Signer(self.token)

            def emit(piece: bytes) -> None:
                frame = signer.frame(piece)
                for other in others:
                    other.put(frame)
                if piece:
                    feed(piece)

            if source is None:
                copies.pack(copy.source, emit)
            else:
                for piece in _frames(source, Signer(self.token)):
                    emit(piece)
            emit(b"")
            for other in others:
                other.finish()

    def accept(self, children: int) -> Iterator[Link]:
        """The hosts that this one serves. Others are sent away."""
        assert self.server is not None
        with (
            selectors.DefaultSelector() as selector,
            closing(Reception(self.server, self.token, selector)) as reception,
        ):
            while children:
                ends = reception.deadline()
                ready = selector.select(None if ends is None else max(0.0, ends - time.monotonic()))
                for other in reception.welcome({key.fd for key, _ in ready}, children):
                    children -= 1
                    yield _wait_for(other)

    def apart(self, work: Callable[[], Any]) -> Any:
        """What `work()` returns, from a process of its own. Raises `LaunchError` with its error, `Lost`."""
        read, write = os.pipe()
        parent = os.getpid()
        if self.link.early:  # what is not a step ends the run
            raise SystemExit(1)
        pid = os.fork()
        if pid == 0:
            try:
                lifeline.die_with_parent(parent)
                try:
                    result = {"is": work()}
                except (*FAILURES, Lost) as error:
                    result = {"error": in_words(error), "lost": isinstance(error, EOFError | Lost)}
                os.write(write, json.dumps(result).encode())
            finally:
                os._exit(0)
        os.close(write)
        try:
            ready, _, _ = select.select([read, self.link.fileno()], [], [])
            if read not in ready:
                self.link.read()
                raise SystemExit(1)
            with open(read, closefd=False) as file:
                result = json.loads(file.read() or '{"error": "its process died", "lost": false}')
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if "error" in result:
            raise (EOFError if result["lost"] else LaunchError)(result["error"])
        return result["is"]


class Served(threading.Thread):
    """Sends one host its frames, at that host's pace: the others, and what comes in, do not wait for it."""

    def __init__(self, link: Link) -> None:
        super().__init__(daemon=True)
        self.link, self.error = link, ""
        self.frames: queue.Queue[bytes | None] = queue.Queue(AHEAD)
        self.start()

    def run(self) -> None:
        while (frame := self.frames.get()) is not None:
            try:
                if not self.error:
                    self.link.socket.sendall(frame)
            except OSError as error:
                self.error = in_words(error)

    def put(self, frame: bytes | None) -> None:
        """Raises `EOFError`: that host is gone."""
        self.check()
        self.frames.put(frame)

    def finish(self) -> None:
        self.put(None)
        self.join()
        self.check()

    def check(self) -> None:
        if self.error:
            raise EOFError(f"the connection to a host that it served broke ({self.error})")


class Signer:
    """Frames of one transfer: length, signature of place and contents, contents. The last is empty."""

    def __init__(self, token: str) -> None:
        self.token, self.number = token.encode(), 0

    def frame(self, piece: bytes) -> bytes:
        return len(piece).to_bytes(4, "big") + self.sign(piece) + piece

    def sign(self, piece: bytes) -> bytes:
        place, self.number = self.number.to_bytes(16, "big"), self.number + 1
        return hashlib.blake2b(piece, digest_size=SIGNATURE, key=self.token, salt=place).digest()


def in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


@contextmanager
def made_or_discarded(copy: Copy) -> Iterator[None]:
    """Once the block has made it, this process holds the copy. If it has not, there is none. Raises `LaunchError`."""
    try:
        yield
        if copy.lock is None and not copy.there():
            raise LaunchError(f"{copy.path} was changed while it was made")
    finally:
        copy.discard()


@contextmanager
def ending_raises() -> Iterator[None]:
    """A signal that ends this process raises `SystemExit` meanwhile: what is half made is removed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, end) for n in ENDING if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _reach(addresses: list[list[Any]], token: str) -> Link:
    return _wait_for(reach(addresses, token, CONNECT_TIMEOUT))


def _wait_for(other: Link) -> Link:
    """A disk may take its time; whether the host lives, launch knows."""
    other.socket.settimeout(None)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        other.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return other


def _frames(source: Link, signer: Signer) -> Iterator[bytes]:
    """Raises `EOFError`: the other host is gone; `LaunchError`: it is not of this run."""
    peer = source.socket.getpeername()[0]
    with source.socket.makefile("rb", buffering=copies.CHUNK) as stream:
        while True:
            try:
                head = stream.read(4 + SIGNATURE)
                piece = stream.read(min(int.from_bytes(head[:4], "big"), 2 * copies.CHUNK))
            except OSError as error:
                raise EOFError(f"the connection to {peer} broke ({in_words(error)})") from None
            if len(head) < 4 + SIGNATURE or len(piece) < int.from_bytes(head[:4], "big"):
                raise EOFError(f"the connection to {peer} broke")
            if signer.sign(piece) != head[4:]:
                raise LaunchError(f"what {peer} sent is not of this run, or was changed on its way")
            if not piece:
                return
            yield piece
