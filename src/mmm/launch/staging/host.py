"""A host's part in `launch --stage`: it gets the copy from one host, and passes it on to others while it unpacks it.

    first host ── tar ─▶ two others ─▶ two more each ─▶ …       launch says who gets it from whom (`spread`)

The data goes from host to host over a `Link`: what was not sent by this run is not unpacked. It is not encrypted. A
step ends early where launch ends, or is gone.
"""

import itertools
import os
import select
import selectors
import signal
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any

from mmm.launch.channel.failures import say
from mmm.launch.channel.handshake import Reception, reach
from mmm.launch.channel.link import CONNECT_TIMEOUT, Link, Lost
from mmm.launch.contract import ENDING
from mmm.launch.errors import LaunchError
from mmm.launch.plan.stage import Stage
from mmm.launch.staging.copy import Copy, Source, pack, scan

FAILURES = (OSError, tarfile.TarError, LaunchError, Lost)


@contextmanager
def on_this_host(stage: Stage) -> Iterator[str]:
    """The path of this host's copy, made if it is not there. Raises `LaunchError`."""
    began = time.monotonic()
    try:
        with ending_raises():
            copy = Copy(scan(stage.source), stage.to)
            copy.own_folder()
            if not copy.is_there():
                copy.make_room()
                copy.make(pack(copy.source))
    except FAILURES as error:
        raise LaunchError(f"--stage {stage.source}: {in_words(error)}") from None
    source = copy.source
    say(stage.done(f"this host, in {copy.path}", source.files, source.size, time.monotonic() - began))
    try:
        yield str(copy.path)
    finally:
        copy.remove(stage.keep)


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
        if self.link.early:  # what is not a step ends the run
            return False
        try:
            with ending_raises(), _ended_by(self.link):
                said = step(**ask)
        except FAILURES as error:
            said = {"error": in_words(error), "doubt": 2 if isinstance(error, Lost) else 0}
        except SystemExit:
            return False
        self.link.send({"stage": said})
        return True

    def wait_and_remove(self, link: Link | None) -> None:
        """This host's ranks are over: wait until those of its other processes are, and remove the copy."""
        for number in ENDING:  # this process ends in any case, and that is all that it has left to do
            signal.signal(number, signal.SIG_IGN)
        keep = self.keep
        with suppress(Lost):
            while link is not None:
                message = link.one(None)
                if "remove" in message:
                    keep, link = not message["remove"], None
        if self.copy is not None:
            self.copy.remove(keep)

    def scan(self, path: str) -> dict[str, Any]:
        return asdict(scan(path))

    def prepare(self, source: dict[str, Any], folder: str | None, keep: bool, listen_at: str) -> dict[str, Any]:
        """The copy, if it is there, and a port at which other hosts can ask for it. listen_at: "": any address."""
        copy, self.keep = Copy(Source(**source), folder), keep
        copy.own_folder()
        self.copy = copy
        if copy.is_there():
            return {"copy": str(copy.path), "port": self.listen(listen_at)}
        copy.make_room()
        return {"port": self.listen(listen_at)}

    def transfer(self, parent: list[list[Any]] | None, children: int, unpack: bool) -> dict[str, Any]:
        """Get the copy from the first address of `parent` that answers (None: from its source), for others too."""
        copy = self.copy
        assert copy is not None
        assert self.server is not None
        with ExitStack() as opened:
            opened.enter_context(closing(self.server))
            others = [opened.enter_context(closing(other)) for other in self.accept(children)]
            if parent is None:
                pieces = pack(copy.source)
            else:
                source = _wait_for(reach(parent, self.token, CONNECT_TIMEOUT))
                pieces = _received(opened.enter_context(closing(source)))
            passed_on = _passed_on(pieces, others)
            if unpack:
                copy.make(passed_on)
            for _ in passed_on:
                pass
        return {"copy": str(copy.path)}

    def listen(self, address: str) -> int:
        self.server = socket.create_server((address, 0))
        return int(self.server.getsockname()[1])

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


def in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


@contextmanager
def ending_raises() -> Iterator[None]:
    """A signal that ends this process raises `SystemExit` meanwhile, once: what is half made is removed."""

    def end(number: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ignored = {number for number in ENDING if signal.getsignal(number) == signal.SIG_IGN} - {signal.SIGTERM}
    previous = {number: signal.signal(number, end) for number in ENDING if number not in ignored}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _ended_by(link: Link) -> Iterator[None]:
    """SIGTERM comes to this thread, the main one, once there is something to read on `link`: the end of the run."""
    over, close_when_over = os.pipe()
    waiting = threading.get_ident()

    def watch() -> None:
        ready, _, _ = select.select([link.fileno(), over], [], [])
        if over not in ready:
            signal.pthread_kill(waiting, signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(close_when_over)
        watcher.join()
        os.close(over)


def _wait_for(other: Link) -> Link:
    """A disk may take its time; whether the host lives, launch knows."""
    other.socket.settimeout(None)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        other.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return other


def _passed_on(pieces: Iterator[bytes], others: Sequence[Link]) -> Iterator[bytes]:
    """The pieces, each once all `others` have been sent it; they get an empty one last. Raises `Lost`."""
    for piece in itertools.chain(pieces, [b""]):
        for other in others:
            try:
                other.send_bytes(piece)
            except Lost as lost:
                raise Lost(f"the connection to a host that it served broke ({lost})") from None
        if piece:
            yield piece


def _received(source: Link) -> Iterator[bytes]:
    """What another host sends. Raises `Lost`: it is gone, or what came is not of this run."""
    peer = source.socket.getpeername()[0]
    while True:
        try:
            pieces = source.read_bytes()
        except Lost as lost:
            raise Lost(f"the connection to {peer} broke ({lost})") from None
        for piece in pieces:
            if not piece:
                return
            yield piece
