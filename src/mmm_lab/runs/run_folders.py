"""Which folders are runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mmm.errors import RecordError
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL, PLOTS

RECORD = {CONFIG, DATASET, JOURNAL}
NOT_SEARCHED = (PLOTS, "checkpoints")


def run_folders(root: Path | str, unreadable: Callable[[OSError], object] | None = None) -> list[Path]:
    """The folders below `root`, and itself, that have a file of a record, by name. A link is followed to a folder that
    has one, if that is not among the others.

    Args:
        unreadable: called for each folder that cannot be looked into.

    Raises:
        RecordError: there is no such folder.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder. Give the folder that holds the runs, e.g. outputs.")
    found = sorted(_walk(folder, unreadable), key=lambda run: (run != folder and run.is_symlink(), run))
    return sorted({run.resolve(): run for run in reversed(found)}.values())  # of several, not the link


def _walk(folder: Path, unreadable: Callable[[OSError], object] | None) -> Iterator[Path]:
    for place, inside, files in os.walk(folder, onerror=unreadable):
        if not RECORD.isdisjoint(files):
            yield Path(place)
            inside[:] = [name for name in inside if name not in NOT_SEARCHED]
        links = (Path(place, name) for name in inside)
        yield from (link for link in links if link.is_symlink() and any(os.path.isfile(link / name) for name in RECORD))
