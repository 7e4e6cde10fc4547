"""Runs a check in a child process that has a time limit, so that whatever it does, there is an answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import NoReturn

from mmm.launch.host import lifeline
from mmm.runtime.doctor.finding import Finding

REAP = 1.0  # s to wait for a killed child; one in an uninterruptible call is left to the system
LEAVE = 0.2  # s for a child to leave by itself
SHOWN = 300  # characters of an error


def isolated(name: str, check: Callable[[], Iterable[Finding]], timeout: float, fix: str = "") -> list[Finding]:
    """The findings of `check()`, called in a forked child; and a failure called `name` if it hangs, raises or dies.

    Args:
        timeout: seconds to wait for each finding.
        fix: what to do about a failure.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(read)
        _answer(parent, write, name, check, fix)
    os.close(write)
    lines: list[bytes] = []
    answered = False
    try:
        answered = _read(read, timeout, lines)
    finally:
        os.close(read)
        killed = _end(pid, LEAVE if answered else 0.0)
    findings = [Finding(**json.loads(line)) for line in lines if line != b"end"]
    if not answered:
        findings.append(Finding(name, "fail", f"gave no answer in {timeout:g} s, and was ended", fix))
    elif lines[-1:] != [b"end"]:
        how = f"was killed by {signal.Signals(killed).name}" if killed else "ended before it had an answer"
        findings.append(Finding(name, "fail", f"the process that checked this {how}", fix))
    return findings


def _answer(parent: int, fd: int, name: str, check: Callable[[], Iterable[Finding]], fix: str) -> NoReturn:
    """In the child: a process group of its own, nothing on the terminal, a line to `fd` for each finding."""
    try:
        lifeline.die_with_parent(parent)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (these may not have been the ones above)
        try:
            for finding in check():
                _line(fd, json.dumps(asdict(finding)))
        except BaseException as error:  # also SystemExit, from what a broken package does at import
            _line(fd, json.dumps(asdict(Finding(name, "fail", shown(error), fix))))
        _line(fd, "end")
    finally:
        os._exit(0)


def _line(fd: int, text: str) -> None:
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int, timeout: float, lines: list[bytes]) -> bool:
    """Add to `lines` what is written to `fd` until its end. False if a line is `timeout` seconds in coming."""
    data = b""
    while True:
        ready, _, _ = select.select([fd], [], [], timeout)
        if not ready:
            return False
        part = os.read(fd, 1 << 16)
        if not part:
            return True
        *whole, data = (data + part).split(b"\n")
        lines += whole
        if lines[-1:] == [b"end"]:
            return True


def _end(pid: int, grace: float) -> int:
    """End the child and all of its group, after `grace` seconds. Returns the signal that it had died of, 0 for none."""
    begin = time.monotonic()
    done = status = 0
    while not done and time.monotonic() < begin + grace + REAP:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and time.monotonic() >= begin + grace:
            for kill in (os.killpg, os.kill):  # not reaped, so the number is still the child's
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        if not done:
            time.sleep(0.002)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind keeps the group's number taken
    return os.WTERMSIG(status) if done and os.WIFSIGNALED(status) else 0


def shown(error: BaseException) -> str:
    """An error in a line or two: its type, what it says, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
    at = f" ({where[0].filename}:{where[0].lineno})" if where else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}{at}"
