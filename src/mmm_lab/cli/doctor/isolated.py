"""Runs a check in a child process that has a time limit, so that whatever it does, there is an answer."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection

from mmm_lab.cli.doctor.finding import Finding
from mmm_verify.ranks.children import LEAVE, Children, ended

SHOWN = 300  # characters of an error


def isolated(name: str, check: Callable[[], Iterable[Finding]], timeout: float, fix: str = "") -> list[Finding]:
    """Returns the findings of `check()`, called in a forked child; and a failure called `name` if it hangs, raises or
    dies.

    Args:
        timeout: seconds to wait for each finding.
        fix: what to do about a failure.
    """
    findings = []
    with Children() as children:
        child = children.fork(lambda end: _answer(end, name, check, fix))
        try:
            # The child sends None after its last finding.
            for finding in iter(partial(child.receive, timeout), None):
                findings.append(finding)
        # `Children` ends it.
        except TimeoutError:
            findings.append(Finding(name, "fail", f"gave no answer in {timeout:g} s, and was ended", fix))
        # The pipe is closed: the child is gone, and has sent no None.
        except (EOFError, OSError):
            outcome = ended(child.stop(LEAVE))
            findings.append(Finding(name, "fail", f"the process of this check: {outcome}", fix))
    return findings


def _answer(end: Connection, name: str, check: Callable[[], Iterable[Finding]], fix: str) -> None:
    """In the child: send each finding, and None at the end. Nothing goes to the terminal."""
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (these may not have been the ones above)
    try:
        for finding in check():
            end.send(finding)
    # Also SystemExit, which a broken package may raise at import.
    except BaseException as error:
        end.send(Finding(name, "fail", shown(error), fix))
    end.send(None)


def shown(error: BaseException) -> str:
    """Format an error in a line or two: its type, what it says, and where."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message[:SHOWN]}"
    if len(message) > SHOWN:
        text += " …"
    # The last frame is where it was raised.
    for frame in traceback.extract_tb(error.__traceback__)[-1:]:
        text += f" ({frame.filename}:{frame.lineno})"
    return text
