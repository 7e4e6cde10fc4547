"""Makes room for the next attempt of a launch: `launch --retries` starts a program again, with the same --outdir.

The record of a failed attempt moves into a folder ``attempt-1``, ``attempt-2``, … of that --outdir. Any other record
stays where it is, and `prepare` refuses to write over it.
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
from mmm_launch.contract import ATTEMPT_VARIABLE, ATTEMPTS_VARIABLE


class Attempt(NamedTuple):
    """One start of a program by `launch`.

    Attributes:
        launch: names the launch; the same in all its attempts.
        retries: how often the launch has started the program again before; 0 for the first attempt.
    """

    launch: str
    retries: int

    def follows(self, other: "Attempt | None") -> bool:
        """Whether the other is an earlier attempt of the same launch."""
        return other is not None and other.launch == self.launch and other.retries < self.retries

    def as_record(self) -> dict[str, str | int]:
        """Return what config.json holds under ``attempt``."""
        return {"of": self.launch, "number": self.retries}


def this_attempt(environ: Mapping[str, str] = os.environ) -> Attempt | None:
    """Return the attempt that this process belongs to; None if no launch has started it."""
    launch = environ.get(ATTEMPTS_VARIABLE)
    retries = environ.get(ATTEMPT_VARIABLE, "")
    if not launch or not retries.isdigit():
        return None
    return Attempt(launch, int(retries))


def make_room(outdir: Path | str, this: Attempt | None) -> str | None:
    """Move the record in `outdir` away, if an earlier attempt of the same launch left it. Call it before `prepare`.

    Args:
        outdir: the run's folder.
        this: the attempt that this process belongs to; None if no launch has started it.

    Returns:
        A note on what was done, for the log and the new record; None if there was nothing to do.

    Raises:
        RecordError: a file cannot be moved.
    """
    folder = Path(outdir).expanduser().absolute()
    config = read_config(folder)
    earlier = attempt_of(config)
    if this is None or earlier is None or not this.follows(earlier):
        return None
    # People count from 1.
    ordinal = earlier.retries + 1
    target = _free_folder(folder, f"attempt-{ordinal}")
    # config.json is moved last: it tells whose record the other files belong to.
    for path in sorted(own_files(folder), key=lambda path: path.name == CONFIG):
        _move(path, target / path.relative_to(folder))
    for emptied in ("plots/mplot/pngs", "plots/mplot/svgs", "plots/mplot", "plots/tplot", "plots", TRACES):
        # A folder may be missing, or hold other files.
        with contextlib.suppress(OSError):
            (folder / emptied).rmdir()
    ending = read_ending(config)
    if ending is None or ending.state not in ENDED:
        ending = Ending(KILLED)
    note = f"attempt {ordinal} of this launch is {ending}; its record is in {target.name}"
    # If the journal is still there, the attempt was killed, because launch has ended its ranks.
    if (target / JOURNAL).exists():
        try:
            finalize_now(target, ending)
        except RecordError as error:
            note += f", as a journal: {error}"
    return note


def attempt_of(config: Mapping[str, Any]) -> Attempt | None:
    """Read the attempt that a config.json belongs to; None if it names none."""
    try:
        attempt = config["attempt"]
        return Attempt(str(attempt["of"]), int(attempt["number"]))
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
        # A user may edit config.json.
        return None


def _free_folder(parent: Path, name: str) -> Path:
    """Return a folder for one attempt's record that holds none yet: another launch may have used the name."""
    folder = parent / name
    for suffix in count(2):
        if not (folder / CONFIG).exists():
            break
        folder = parent / f"{name}-{suffix}"
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
