"""How a run ended, as a word and a line, in config.json and in the dataset's attributes; and what comes after one that
failed: `launch --retries` starts the program again, in the same --outdir.

The record of the attempt that failed moves into a folder ``attempt-1``, ``attempt-2``, … of that --outdir. Any other
record stays where it is, and `prepare` refuses it.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmm.contract import ATTEMPT_VARIABLE, ATTEMPTS_VARIABLE, CONSEQUENCES, ENDING, VERDICT_VARIABLE
from mmm.errors import RecordError
from mmm.history.record import CONFIG, JOURNAL, own_files, reason, write_atomically
from mmm.runtime.failure import first_failure

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
        return {"state": self.state} | ({"error": self.error} if self.error else {})

    def on(self, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with this ending in place of the one it had."""
        return {name: value for name, value in config.items() if name not in ("state", "error")} | self.attrs()


def ending_of(error: BaseException | None) -> Ending:
    """The ending for an exception that leaves a run's ``with`` block; None is a run that finished.

    Under `launch` a run that ends because another rank has failed gets that rank's failure.
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Ending(FINISHED)
    if number := _signal(error):
        first = first_failure()
        return Ending(FAILED, one_line(first)) if first else Ending(INTERRUPTED, number.name)
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
        if first := first_failure():
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
    return Ending(state, str(attrs.get("error", ""))) if isinstance(state, str) else None


def config_with(text: str, ending: Ending) -> str:
    """The text of a config.json with that ending; one that is no mapping stays as it is."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    return json.dumps(ending.on(config), indent=2, ensure_ascii=False) + "\n" if isinstance(config, dict) else text


def write_ending(folder: Path, ending: Ending) -> None:
    """Put the ending into the folder's config.json, if it has one. RecordError if that cannot be written."""
    text = read_config(folder)
    if (new := config_with(text, ending)) != text:
        write_atomically(folder / CONFIG, new.encode())


def read_config(folder: Path) -> str:
    """config.json's text; empty where there is none."""
    try:
        return (folder / CONFIG).read_text()
    except OSError:
        return ""


def config_ending(text: str) -> Ending | None:
    """The ending in the text of a config.json."""
    try:
        return read_ending(json.loads(text or "{}"))
    except ValueError:
        return None


class Attempt(NamedTuple):
    """One start of a program by `launch`: `of` is the launch, the same in all its attempts; `number` counts from 0."""

    of: str
    number: int


def this_attempt(environ: Mapping[str, str] = os.environ) -> Attempt | None:
    """The attempt that this process belongs to; None where no launch has started it."""
    of, number = environ.get(ATTEMPTS_VARIABLE), environ.get(ATTEMPT_VARIABLE, "")
    return Attempt(of, int(number)) if of and number.isdigit() else None


def make_room(outdir: Path | str, this: Attempt | None) -> str | None:
    """Move the record in `outdir` away, if an earlier attempt of the same launch left it. Call it before `prepare`.

    Returns:
        What was done, for the log and the new record; None if there was nothing to do.

    Raises:
        RecordError: a file cannot be moved.
    """
    folder = Path(outdir).expanduser().absolute()
    config = read_config(folder)
    earlier = _attempt_of(config)
    if this is None or earlier is None or earlier.of != this.of or earlier.number >= this.number:
        return None
    target = _free(folder, f"attempt-{earlier.number + 1}")
    for path in sorted(own_files(folder), key=lambda path: path.name == CONFIG):  # last: it says whose they are
        _move(path, target / path.relative_to(folder))
    for emptied in ("plots/mplot/pngs", "plots/mplot/svgs", "plots/mplot", "plots/tplot", "plots"):
        with contextlib.suppress(OSError):  # it is missing, or holds other files
            (folder / emptied).rmdir()
    ending = config_ending(config)
    if ending is None or ending.state not in ENDED:
        ending = Ending(KILLED)
    text = f"attempt {earlier.number + 1} of this launch is {ending}; its record is in {target.name}"
    return f"{text}{_finalize(target, ending)}"


def _attempt_of(config: str) -> Attempt | None:
    try:
        kept = json.loads(config or "{}").get("attempt")
        return Attempt(str(kept["of"]), int(kept["number"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # a user may edit config.json


def _free(folder: Path, name: str) -> Path:
    """A free folder for one attempt's record: another launch may have used that name."""
    names = (name if count == 1 else f"{name}-{count}" for count in range(1, 1_000_000))
    return next(folder / name for name in names if not (folder / name / CONFIG).exists())


def _move(path: Path, to: Path) -> None:
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, to)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(
            f"cannot move {path} to {to}, out of the way of the next attempt: {reason(error)}. "
            "Move it by hand, or give another --outdir."
        ) from error


def _finalize(target: Path, ending: Ending) -> str:
    """Make the dataset of an attempt that was killed: launch has ended its ranks. Returns a note if that fails."""
    from mmm.history.reader import finalize_now

    if not (target / JOURNAL).exists():
        return ""
    try:
        finalize_now(target, ending)
    except RecordError as error:
        return f", as a journal: {error}"
    return ""
