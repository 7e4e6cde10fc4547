"""The lines of a run in the log: one for each row, in 120 columns, and one for its end. The record has every value."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping

from mmm.history.record.dataset import is_known
from mmm.run.rows import Totals
from mmm.units import counted, duration, size

WIDTH = 120
WHAT_A_LINE_HAS = f"the console shows those that fit in {WIDTH} characters; the record has all"
# Characters before the line, without the program's name.
HEAD = len("[2025-01-03 09:58:07.893360][INFO][:227] - ")
LOSSES = ("loss", "train_loss", "val_loss", "test_loss")
# These are always in the line, and so is what a program adds by a name of its own.
ALWAYS = ("iter", "epoch", *LOSSES, "test_acc")
# These follow in this order of importance while there is room; the members of a group together.
WHILE_THERE_IS_ROOM = (
    ("dt",),
    ("left",),
    ("dtf", "dtb"),
    ("dtw",),
    ("grad_norm",),
    ("lr",),
    ("mfu",),
    ("val_bpb",),
    ("dto",),
)
RATES = ("sps", "tps", "sps_per_gpu", "tps_per_gpu")
RATE_UNITS = {"tps": "tokens/s", "sps": "samples/s"}


def row_line(
    values: Mapping[str, float | int],
    program: str,
    steps: float | None = None,
    left: float | None = None,
) -> str:
    """``iter=19/120 loss=2.6133 dt=0.483 dtf=0.182 dtb=0.299 tps=4237 left=49s``, in the order of `values`.

    Args:
        values: the row's values, by name.
        program: the name that stands in the head of the line.
        steps: number of steps (or epochs) of the run. None: it is not known.
        left: seconds that the rest of them takes. None: it is not known.
    """
    items = {}
    for name, value in values.items():
        items[name] = f"{name}={shown(name, value)}"
    if steps:
        for name in ("iter", "epoch"):
            if name in items:
                items[name] += f"/{steps:.0f}"
                break
    if left is not None:
        items["left"] = f"left={duration(left, short=True)}"
    # No skipped step is the usual case, and not worth an item.
    if not values.get("skipped"):
        items.pop("skipped", None)
    rate = "tps" if "tps" in items else "sps"
    in_line: set[str] = set()
    for name in items:
        is_own = name != "left" and not is_known(name)
        if is_own or name in ("skipped", *ALWAYS, rate):
            in_line.add(name)
    # Each item takes a space as well.
    widths = {name: len(item) + 1 for name, item in items.items()}
    room = WIDTH - HEAD - len(program)
    room -= sum(widths[name] for name in in_line)
    for group in WHILE_THERE_IS_ROOM:
        names = [name for name in group if name in items and name not in in_line]
        width = sum(widths[name] for name in names)
        # The last item of a line has no space after it.
        if width <= room + 1:
            in_line.update(names)
            room -= width
    return " ".join(item for name, item in items.items() if name in in_line)


def shown(name: str, value: float | int) -> str:
    """A value as the line has it: four decimals of a loss, three digits of others, no fraction of a large rate."""
    if type(value) is int:
        return str(value)
    size = abs(value)
    if name in LOSSES or name == "val_bpb":
        if 0.1 <= size < 1e3:
            return f"{value:.4f}"
        if 1e-4 <= size < 1e3:
            return f"{value:#.4g}"
        return f"{value:.4e}"
    is_large_rate = name in RATES and size >= 100
    if is_large_rate or 1e3 <= size < 1e6:
        return f"{value:.0f}"
    return f"{value:#.3g}".removesuffix(".")


def done(totals: Totals, seconds: float) -> str:
    """``done: 120 steps; 1.2 min since the start, 58.3 s in steps, 4,237 tokens/s on average; loss 2.6133``.

    A resumed run says ``120 steps, 200 with those before``: seconds and rates cover the steps that it has made itself.

    Args:
        seconds: seconds since the start.
    """
    rates = totals.rates()
    rate = ""
    for name, unit in RATE_UNITS.items():
        if name in rates:
            rate = f", {rates[name]:,.0f} {unit} on average"
            break
    # Rows are those of steps or of epochs.
    noun = "epoch" if "epoch" in (totals.place or ()) else "step"
    made = counted(totals.made, noun)
    if totals.count != totals.made:
        made += f", {totals.count} with those before"
    since_start = duration(seconds, 1)
    in_steps = duration(totals.seconds, 1)
    took = f"{since_start} since the start, {in_steps} in steps"
    last = []
    for name, value in totals.last.items():
        if name in (*LOSSES, "test_acc"):
            last.append(f"{name} {shown(name, value)}")
    return f"done: {made}; {took}{rate}; {', '.join(last)}"


def used() -> str:
    """``rank 0: 41.3 s of CPU time, at most 512 MiB of memory``: what this process has used until now. For rank 0."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = duration(time.process_time(), 1)
    # macOS counts bytes, other systems KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return f"rank 0: {seconds} of CPU time, at most {size(unit * peak)} of memory"
