"""How a run ended, as a word and a line, in config.json and in the dataset's attributes."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from mmm.history.record.folder import CONFIG, write_atomically
from mmm.outside import parse_json, printable, read_file
from mmm.runtime.contract import CONSEQUENCES, ENDING, SAVED_EXIT, VERDICT_VARIABLE, first_failure

RUNNING = "running"
FINISHED = "finished"
INTERRUPTED = "interrupted"  # by a signal, or Ctrl-C
FAILED = "failed"  # by an exception
KILLED = "killed"  # without a word of its own
ENDED = (FINISHED, INTERRUPTED, FAILED)  # what a run itself writes
LONGEST = 500  # characters of an error that are kept
VERDICT_WAIT = 2.0  # s; launch itself waits up to half a second for a better cause than a lost connection


class Ending(NamedTuple):
    """`state` is one of the words above; `error` the signal's name, or the error's type and message, in one line."""

    state: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.error}" if self.error else self.state

    def attrs(self) -> dict[str, str]:
        """As attributes: ``state``, and ``error`` if there is one."""
        attrs = {"state": self.state}
        if self.error:
            attrs["error"] = self.error
        return attrs


def ending_of(error: BaseException | None) -> Ending:
    """The ending for an exception that leaves a run's ``with`` block; None is a run that finished.

    Under `launch` a run that ends because another rank has failed gets that rank's failure.
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Ending(FINISHED)
    if isinstance(error, SystemExit) and error.code == SAVED_EXIT:
        return Ending(INTERRUPTED, "a signal; the state is saved")
    received = _signal(error)
    if received is not None:
        first = first_failure()
        return Ending(FAILED, one_line(first)) if first else Ending(INTERRUPTED, received.name)
    text = f"{type(error).__name__}: {error}"
    return Ending(FAILED, one_line(_cause(text) or text))


def _signal(error: BaseException) -> signal.Signals | None:
    """The signal that has ended the run, if any: KeyboardInterrupt, or exit code 128 + signal."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else None
    return next((signal.Signals(number) for number in ENDING if code == 128 + number), None)


def _cause(text: str) -> str | None:
    """Why the ranks end, for one that lost another: launch knows it a moment later. None without an answer."""
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
    """`text` without line breaks, and no longer than an attribute should be."""
    line = " ".join(text.split()).removesuffix(":")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def read_ending(attrs: Any) -> Ending | None:
    """The ending in a config or a dataset's attributes; None where there is none, as in older records."""
    state = attrs.get("state") if hasattr(attrs, "get") else None
    return Ending(printable(state), printable(str(attrs.get("error", "")))) if isinstance(state, str) else None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; empty where there is none, or where it is no JSON object: anybody may edit it."""
    try:
        return parse_json(_text_of(folder))
    except ValueError:
        return {}


def config_text(folder: Path, ending: Ending) -> str:
    """The text of config.json with this ending; empty where there is none. One that is no mapping stays as it is."""
    text = _text_of(folder)
    try:
        config = parse_json(text)
    except ValueError:
        return text
    lasting = {name: value for name, value in config.items() if name not in ("state", "error")}
    return json.dumps(lasting | ending.attrs(), indent=2, ensure_ascii=False) + "\n"


def write_ending(folder: Path, ending: Ending) -> None:
    """Put the ending into the folder's config.json, if it has one. RecordError if that cannot be written."""
    text = config_text(folder, ending)
    if text != _text_of(folder):
        write_atomically(folder / CONFIG, text.encode("utf-8", "backslashreplace"))


def _text_of(folder: Path) -> str:
    """config.json's text; empty where there is none."""
    try:
        return read_file(folder / CONFIG).decode()
    except (OSError, UnicodeDecodeError):
        return ""
