"""Tells how a run ended, as a word and a line, which are kept in config.json and in the dataset's attributes."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from mmm.history.record.folder import CONFIG, write_atomically
from mmm.outside import parse_json, printable, read_file
from mmm_launch.contract import CONSEQUENCES, ENDING, SAVED_EXIT, VERDICT_VARIABLE, first_failure

RUNNING = "running"
FINISHED = "finished"
# By a signal, or Ctrl-C.
INTERRUPTED = "interrupted"
# By an exception.
FAILED = "failed"
# The run ended without writing how.
KILLED = "killed"

# The states that a run itself writes at its end.
ENDED = (FINISHED, INTERRUPTED, FAILED)

# Characters of an error that are kept.
LONGEST = 500

# Seconds. Launch itself waits up to half a second for a better cause than a lost connection.
VERDICT_WAIT = 2.0


class Ending(NamedTuple):
    """How a run ended.

    Attributes:
        state: one of the words above.
        error: the signal's name, or the error's type and message, in one line.
    """

    state: str
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.state}: {self.error}"
        return self.state

    def attrs(self) -> dict[str, str]:
        """Return the ending as attributes: ``state``, and ``error`` if there is one."""
        attrs = {"state": self.state}
        if self.error:
            attrs["error"] = self.error
        return attrs


def ending_of(error: BaseException | None) -> Ending:
    """Return the ending of a run whose ``with`` block was left by an exception, or by None if the run finished.

    Under `launch`, a run that ends because another rank has failed gets that rank's failure.
    """
    if error is None:
        return Ending(FINISHED)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return Ending(FINISHED)
    if isinstance(error, SystemExit) and error.code == SAVED_EXIT:
        return Ending(INTERRUPTED, "a signal; the state is saved")
    received = _signal(error)
    if received is not None:
        # launch ends the other ranks by a signal when one has failed.
        first = first_failure()
        if first:
            return Ending(FAILED, one_line(first))
        return Ending(INTERRUPTED, received.name)
    text = f"{type(error).__name__}: {error}"
    return Ending(FAILED, one_line(_cause(text) or text))


def _signal(error: BaseException) -> signal.Signals | None:
    """The signal that has ended the run, if any: Python raises KeyboardInterrupt, others exit with 128 + signal."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit):
        for ending in ENDING:
            if error.code == 128 + ending:
                return ending
    return None


def _cause(text: str) -> str | None:
    """Ask launch why the ranks end, if this one has lost another: launch knows it a moment later.

    None if this rank has failed by itself, or if launch does not answer.
    """
    if not any(sign in text for sign in CONSEQUENCES):
        return None
    deadline = time.monotonic() + VERDICT_WAIT
    while VERDICT_VARIABLE in os.environ and time.monotonic() < deadline:
        first = first_failure()
        if first:
            return first
        time.sleep(0.02)
    return None


def one_line(text: str) -> str:
    """Return `text` without line breaks, and no longer than an attribute should be."""
    line = " ".join(text.split()).removesuffix(":")
    if len(line) > LONGEST:
        line = f"{line[: LONGEST - 1]}…"
    return line


def read_ending(attrs: Any) -> Ending | None:
    """Read the ending in a config or a dataset's attributes; None if there is none, as in older records."""
    if not hasattr(attrs, "get"):
        return None
    state = attrs.get("state")
    if not isinstance(state, str):
        return None
    error = str(attrs.get("error", ""))
    return Ending(printable(state), printable(error))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; empty if there is none, or if it is not a JSON object: anybody may edit it."""
    try:
        return parse_json(_text_of(folder))
    except ValueError:
        return {}


def config_text(folder: Path, ending: Ending) -> str:
    """Return the text of config.json with this ending; empty if there is no such file.

    A text that is not a mapping stays as it is.
    """
    text = _text_of(folder)
    try:
        config = parse_json(text)
    except ValueError:
        return text
    # An earlier ending is taken out: it may have an error, and the new one none.
    for name in ("state", "error"):
        config.pop(name, None)
    config.update(ending.attrs())
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def write_ending(folder: Path, ending: Ending) -> None:
    """Put the ending into the folder's config.json, if it has one.

    Raises:
        RecordError: the file cannot be written.
    """
    text = config_text(folder, ending)
    if text != _text_of(folder):
        write_atomically(folder / CONFIG, text.encode("utf-8", "backslashreplace"))


def _text_of(folder: Path) -> str:
    """Read config.json's text; empty if there is no such file."""
    try:
        return read_file(folder / CONFIG).decode()
    except (OSError, UnicodeDecodeError):
        return ""
