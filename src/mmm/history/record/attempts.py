"""Room for the next attempt of a launch: `launch --retries` starts a program again, in the same --outdir.

The record of an attempt that failed moves into a folder ``attempt-1``, ``attempt-2``, … of that --outdir. Any other
record stays where it is, and `prepare` refuses it.
"""

import contextlib
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mmm.errors import RecordError
from mmm.history.record.dataset import finalize_now
from mmm.history.record.ending import ENDED, KILLED, Ending, read_config, read_ending
from mmm.history.record.folder import CONFIG, JOURNAL, TRACES, own_files, reason
from mmm.runtime.contract import ATTEMPT_VARIABLE, ATTEMPTS_VARIABLE


class Attempt(NamedTuple):
    """One start of a program by `launch`: `of` is the launch, the same in all its attempts; `number` counts from 0."""

    of: str
    number: int

    def follows(self, other: "Attempt | None") -> bool:
        """Whether the other is an earlier attempt of the same launch."""
        return other is not None and other.of == self.of and other.number < self.number


def this_attempt(environ: Mapping[str, str] = os.environ) -> Attempt | None:
    """The attempt that this process belongs to; None where no launch has started it."""
    of = environ.get(ATTEMPTS_VARIABLE)
    number = environ.get(ATTEMPT_VARIABLE, "")
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
    if this is None or earlier is None or not this.follows(earlier):
        return None
    target = _free_folder(folder, f"attempt-{earlier.number + 1}")
    # config.json is moved last: it says whose the other files are.
    for path in sorted(own_files(folder), key=lambda path: path.name == CONFIG):
        _move(path, target / path.relative_to(folder))
    for emptied in ("plots/mplot/pngs", "plots/mplot/svgs", "plots/mplot", "plots/tplot", "plots", TRACES):
        with contextlib.suppress(OSError):  # it is missing, or holds other files
            (folder / emptied).rmdir()
    ending = read_ending(config)
    if ending is None or ending.state not in ENDED:
        ending = Ending(KILLED)
    note = f"attempt {earlier.number + 1} of this launch is {ending}; its record is in {target.name}"
    if (target / JOURNAL).exists():  # it was killed: launch has ended its ranks
        try:
            finalize_now(target, ending)
        except RecordError as error:
            note += f", as a journal: {error}"
    return note


def attempt_of(config: Mapping[str, Any]) -> Attempt | None:
    """The attempt that config.json says; None where it says none."""
    try:
        attempt = config["attempt"]
        return Attempt(str(attempt["of"]), int(attempt["number"]))
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
        return None  # a user may edit config.json


def _free_folder(parent: Path, name: str) -> Path:
    """A folder for one attempt's record: another launch may have used that name."""
    folder = parent / name
    for number in count(2):
        if not (folder / CONFIG).exists():
            break
        folder = parent / f"{name}-{number}"
    return folder


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
