"""How far a run is: the steps that are left, the age of its last row, and its last checkpoint."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import numpy as np

from mmm.units import duration
from mmm_lab.cli import whole

if TYPE_CHECKING:
    from mmm_lab.runs.runs import Run

RECENT_ROWS = 50  # their mean predicts the time of a step
SILENT_SECONDS = 60.0
SILENT_STEPS = 10
# What a run notes where it could not save (`mmm.run`).
FAILED_SAVE = re.compile(r"no checkpoint of step (\d{1,18}): ")


def progress(run: Run) -> list[tuple[str, str]]:
    """Rows for the summary of ``mmm history``: a name and a text each, which is empty if there is nothing to say."""
    if run.ending.state != "running":
        return [("checkpoint", checkpoint_text(run))]
    return [
        ("left", left_text(run)),
        ("last row", age_text(run)),
        ("checkpoint", checkpoint_text(run)),
    ]


def seconds_per_step(run: Run) -> float | None:
    """Seconds per step of the last 50 rows. The first row is left out: it includes warm-up. None before a row."""
    dt = run.rows.get("dt")
    if dt is None:
        return None
    timed = dt[np.isfinite(dt)]
    if len(timed) > 1:
        timed = timed[1:][-RECENT_ROWS:]
    if not len(timed):
        return None
    return float(np.mean(timed))


def left_text(run: Run) -> str:
    """The steps or epochs that are left, and how long they take at the pace of the last rows."""
    if run.steps is None:
        return ""
    # A run that was resumed with fewer steps may have made more than these.
    steps_left = max(run.steps - (run.steps_done or 0.0), 0.0)
    text = f"{whole(steps_left)} of {whole(run.steps)} {run.row_of}s"
    per_step = seconds_per_step(run)
    if per_step is None:
        return text
    return f"{text}, {duration(steps_left * per_step)}, without validation and checkpoints"


def age_text(run: Run) -> str:
    """How long ago the last row was written, by the time of the journal."""
    from mmm.history.record.folder import JOURNAL

    try:
        written = (run.folder / JOURNAL).stat().st_mtime
    except OSError:
        # The run has ended meanwhile, and has removed it.
        return ""
    age = max(time.time() - written, 0.0)
    # A run whose steps are slow is not silent as long as it keeps its own pace.
    patience = max(SILENT_SECONDS, SILENT_STEPS * (seconds_per_step(run) or 0.0))
    if age > patience:
        return f"silent for {duration(age)}"
    return f"written {duration(age)} ago"


def checkpoint_text(run: Run) -> str:
    """The last checkpoint that is complete, its age, and a later one that could not be saved."""
    from mmm.checkpoint.manifest import steps_of

    texts = []
    newest_step = -1
    try:
        newest = steps_of(run.folder / "checkpoints")[0]
        newest_step = int(newest.name.rpartition("-")[2])
        texts.append(f"{newest.name}, saved {duration(max(time.time() - newest.stat().st_mtime, 0.0))} ago")
    except (OSError, IndexError):
        # None was saved, or it was removed meanwhile.
        pass
    failed_step, note = last_failed_save(run)
    if failed_step > newest_step:
        texts.append(note)
    return "; ".join(texts)


def last_failed_save(run: Run) -> tuple[int, str]:
    """The step of the last save that failed, and what the run noted of it. Step -1: none failed."""
    notes = run.config.get("notes")
    # Another program's config.json may have anything there.
    if not isinstance(notes, list):
        notes = []
    failed = (-1, "")
    for note in notes:
        match = FAILED_SAVE.match(str(note))
        if match:
            failed = (int(match[1]), str(note))
    return failed
