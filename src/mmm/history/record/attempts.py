"""Room for the next attempt of a launch: `launch --retries` starts a program again, in the same --outdir.

The record of an attempt that failed moves into a folder ``attempt-1``, ``attempt-2``, … of that --outdir. Any other
record stays where it is, and `prepare` refuses it.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mmm.errors import RecordError
from mmm.history.record.dataset import finalize_now
from mmm.history.record.ending import ENDED, KILLED, Ending, config_ending, parsed, read_config
from mmm.history.record.folder import CONFIG, JOURNAL, TRACES, own_files, reason
from mmm.runtime.contract import ATTEMPT_VARIABLE, ATTEMPTS_VARIABLE


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
    earlier = attempt_of(config)
    if this is None or earlier is None or earlier.of != this.of or earlier.number >= this.number:
        return None
    target = _free(folder, f"attempt-{earlier.number + 1}")
    for path in sorted(own_files(folder), key=lambda path: path.name == CONFIG):  # last: it says whose they are
        _move(path, target / path.relative_to(folder))
    for emptied in ("plots/mplot/pngs", "plots/mplot/svgs", "plots/mplot", "plots/tplot", "plots", TRACES):
        with contextlib.suppress(OSError):  # it is missing, or holds other files
            (folder / emptied).rmdir()
    ending = config_ending(config)
    if ending is None or ending.state not in ENDED:
        ending = Ending(KILLED)
    text = f"attempt {earlier.number + 1} of this launch is {ending}; its record is in {target.name}"
    return f"{text}{_finalize(target, ending)}"


def attempt_of(config: str) -> Attempt | None:
    """The attempt that the text of a config.json says; None where it says none."""
    try:
        attempt = parsed(config)["attempt"]
        return Attempt(str(attempt["of"]), int(attempt["number"]))
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
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
    if not (target / JOURNAL).exists():
        return ""
    try:
        finalize_now(target, ending)
    except RecordError as error:
        return f", as a journal: {error}"
    return ""
