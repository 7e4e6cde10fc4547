"""Finds the folders of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mmm.errors import RecordError
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL, PLOTS

RECORD = {CONFIG, DATASET, JOURNAL}
NOT_SEARCHED = (PLOTS, "checkpoints")


def run_folders(root: Path | str, unreadable: Callable[[OSError], object] | None = None) -> list[Path]:
    """The folders of runs in `root`, including `root` itself, sorted by name.

    A folder is a run if it has a file of a record. Links to such folders are followed, unless the folder is found
    without the link.

    Args:
        unreadable: called with the error for each folder that cannot be read.

    Raises:
        RecordError: `root` is not a folder.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder. Give the folder that holds the runs, e.g. outputs.")
    # Links come last, so that a folder's own path is the one that is kept.
    runs = sorted(_walk(folder, unreadable), key=lambda run: (run != folder and run.is_symlink(), run))
    by_target: dict[Path, Path] = {}
    for run in runs:
        by_target.setdefault(run.resolve(), run)
    return sorted(by_target.values())


def _walk(folder: Path, unreadable: Callable[[OSError], object] | None) -> Iterator[Path]:
    """The folders that have a file of a record. Runs inside of a run count, but not in its plots and checkpoints."""
    for path, subfolders, files in os.walk(folder, onerror=unreadable):
        if not RECORD.isdisjoint(files):
            yield Path(path)
            # os.walk goes into the subfolders that are left in this list.
            subfolders[:] = [name for name in subfolders if name not in NOT_SEARCHED]
        for name in subfolders:
            # os.walk does not follow links.
            link = Path(path, name)
            if link.is_symlink() and any(os.path.isfile(link / file) for file in RECORD):
                yield link
