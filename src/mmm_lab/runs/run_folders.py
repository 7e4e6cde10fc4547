"""Which folders are runs, and what to call several of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL, PLOTS
from mmm.outside import printable

if TYPE_CHECKING:
    from mmm_lab.runs.runs import Run

RECORD = {CONFIG, DATASET, JOURNAL}
NOT_SEARCHED = (PLOTS, "checkpoints")


def names_of(runs: Sequence[Run]) -> list[str]:
    """Of each run: its name, where no other of these has it, or else its folder without what all have in front."""
    folders = [run.folder.expanduser().absolute() for run in runs]
    shared = Path(os.path.commonpath(folders))
    short = [str(folder.relative_to(shared)) if folder != shared else folder.name for folder in folders]
    given = [run.name for run in runs]
    named = zip(given, short, strict=True)
    return [printable(name if name and given.count(name) == 1 else folder) for name, folder in named]


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
