"""The lines of a run in the log: of each row, in 120 columns, and of its end. The record has every number, in full."""

from __future__ import annotations

from collections.abc import Mapping

from mmm.history.record.dataset import is_known
from mmm.run.rows import Totals
from mmm.units import counted, duration

WIDTH = 120
WHAT_A_LINE_HAS = "a line has as many of them as 120 columns hold, and the record has all"
HEAD = len("[2025-01-03 09:58:07.893360][INFO][:227] - ")  # before the line, without the program's name
LOSSES = ("loss", "train_loss", "val_loss", "test_loss")
# What a program adds by a name of its own is always there, and so are these.
FIRST = ("iter", "epoch", *LOSSES, "test_acc")
# While there is room.
THEN = (("dt",), ("left",), ("dtf", "dtb"), ("dtw",), ("grad_norm",), ("lr",), ("mfu",), ("val_bpb",), ("dto",))
RATES = ("sps", "tps", "sps_per_gpu", "tps_per_gpu")
RATE_UNITS = {"tps": "tokens/s", "sps": "samples/s"}


def row_line(
    numbers: Mapping[str, float | int], program: str, steps: float | None = None, left: float | None = None
) -> str:
    """``iter=19/120 loss=2.6133 dt=0.483 dtf=0.182 dtb=0.299 tps=4237 left=49s``, in the order of `numbers`.

    Args:
        program: the name that stands in the line's head.
        steps: of the run, or epochs; None where that is not known. left: seconds for those that are left.
    """
    words = {name: f"{name}={shown(name, value)}" for name, value in numbers.items()}
    place = next((name for name in ("iter", "epoch") if name in words), None)
    if steps and place:
        words[place] += f"/{steps:.0f}"
    if left is not None:
        words["left"] = f"left={duration(left, short=True)}"
    if not numbers.get("skipped"):
        words.pop("skipped", None)
    own = [name for name in words if name not in ("skipped", "left") and not is_known(name)]
    rate = "tps" if "tps" in words else "sps"
    kept: set[str] = set()
    room = WIDTH - HEAD - len(program)
    for names in (*((name,) for name in (*own, "skipped", *FIRST, rate)), *THEN):
        shown_names = [name for name in names if name in words and name not in kept]
        width = sum(len(words[name]) + 1 for name in shown_names)
        if names not in THEN or width <= room + 1:
            kept.update(shown_names)
            room -= width
    return " ".join(word for name, word in words.items() if name in kept)


def shown(name: str, value: float | int) -> str:
    """Four decimals of a loss, three digits of others, no fraction of a large rate."""
    if type(value) is int:
        return str(value)
    if name in LOSSES or name == "val_bpb":
        size = abs(value)
        return f"{value:.4f}" if 0.1 <= size < 1e3 else f"{value:#.4g}" if 1e-4 <= size < 1e3 else f"{value:.4e}"
    if name in RATES and abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}".removesuffix(".") if not 1e3 <= abs(value) < 1e6 else f"{value:.0f}"


def done(totals: Totals, seconds: float) -> str:
    """``done: 120 steps; 1.2 min since the start, 58.3 s in steps, 4,237 tokens/s on average; loss 2.6133``.

    A run that goes on says ``120 steps, 200 with those before``: seconds and rates are of the steps that it has made.

    Args:
        seconds: since the start.
    """
    rates = totals.rates()
    rate = next((f", {rates[name]:,.0f} {unit} on average" for name, unit in RATE_UNITS.items() if name in rates), "")
    what = "epoch" if "epoch" in (totals.place or ()) else "step"
    took = f"{duration(seconds, 1)} since the start, {duration(totals.seconds, 1)} in steps"
    last = [f"{name} {shown(name, value)}" for name, value in totals.last.items() if name in (*LOSSES, "test_acc")]
    made = counted(totals.made, what)
    if totals.count != totals.made:
        made += f", {totals.count} with those before"
    return f"done: {made}; {took}{rate}; {', '.join(last)}"
