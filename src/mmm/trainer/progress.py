"""A progress bar on a terminal, on rank 0; nothing in a file or on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from mmm.runtime.ranks import Rank


def epochs_bar(steps: range, by: int, rank: Rank) -> Iterator[int]:
    """The steps; on a terminal, with a bar for each epoch of `by` steps.

    The bar is gone when the epoch's last step is given, so that the epoch's row has the terminal for itself.
    """
    if not rank.is_main or not sys.stdout.isatty():
        yield from steps
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    for number in range(steps.start // by, -(-steps.stop // by)):
        epoch = range(max(number * by, steps.start), min((number + 1) * by, steps.stop))
        with Progress(*columns, transient=True) as bar:
            line = bar.add_task(f"epoch {number + 1}", total=len(epoch))
            for step in epoch[:-1]:
                yield step
                bar.advance(line)
        yield epoch[-1]
