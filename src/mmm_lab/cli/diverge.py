"""``mmm diverge RUN_A RUN_B``: the first step at which two runs part, on whatever layouts, and where in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm.history.record.fingerprints import GRADIENT, INPUTS, LOSS, TARGETS, WEIGHT
from mmm.outside import printable_lines
from mmm.units import counted
from mmm_lab.cli import show
from mmm_lab.cli.parser import Parser

if TYPE_CHECKING:
    from mmm_lab.runs.diverge import Divergence

EPILOG = """\
Train both runs with --fingerprints 1, or every so many steps. They are compared by sums that do not depend on the
layout: of the batch, the loss, each gradient from the last layer back, and each weight after the step.

Exit code: 0 the same, 1 they part, 2 they cannot be compared. docs/verify.md says more.
"""


def main(argv: list[str]) -> int:
    """Print where two runs part. Returns the exit code. Raises UserError."""
    parser = Parser(
        prog="mmm diverge",
        description="Where do two runs part?",
        epilog=EPILOG,
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument(
        "--tolerance", type=float, help="relative difference from which on they part (1e-9, 1e-3 or 0.05, by dtype)"
    )
    args = parser.parse_args(argv)
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"--tolerance {args.tolerance:g}: it must be a number from 0 on")
    from mmm_lab.runs.diverge import diverge

    result = diverge(args.runs[0], args.runs[1], args.tolerance)
    show(printable_lines(report(result, args.runs)) + "\n")
    return int(result.step is not None)


def report(result: Divergence, runs: Sequence[Path]) -> str:
    """As text."""
    about = [
        f"  {run}: {header.layout}, {header.dtype}, {counted(header.ranks, 'rank')}"
        for run, header in zip(runs, result.headers, strict=True)
    ]
    steps = [step for step in result.largest if step >= 0]
    if result.step is None or result.entry is None:
        largest = max(result.largest.values())
        compared = counted(len(steps), "step")
        return "\n".join([f"the same: {compared}, to {largest:.0e} (≤ {result.tolerance:.0e})", *about])
    where = "before the first step" if result.step < 0 else f"at step {result.step}"
    lines = [f"they part {where}, at the {_named(result.entry)}: off by {result.difference:.1e}", *about]
    lines.append(f"  before it  {_before(result)}")
    if result.step >= 0:
        lines.append(f"  the same   {_counted(result.same) or 'nothing'}")
    lines.append(f"  off too    {_counted(result.likewise) or 'nothing'}")
    if result.block and result.entry == LOSS:
        lines.append(f"  begins at  the {result.block}")
    if result.ranks:
        lines.append(f"  ranks      {result.ranks}")
    return "\n".join(lines)


def _named(entry: str) -> str:
    return entry.removeprefix("the ")


def _before(result: Divergence) -> str:
    earlier = [(step, largest) for step, largest in result.largest.items() if step != result.step]
    if not earlier:
        return "nothing was compared"
    (first, smallest), (last, largest) = earlier[0], earlier[-1]
    told = f"largest difference {smallest:.0e} at step {first}"
    told += f", {largest:.0e} at step {last}" if last != first else ""
    return told.replace("at step -1", "of the first weights") + (
        ": it came at once" if result.at_once else ": it has grown, as rounding does"
    )


def _counted(entries: Sequence[str]) -> str:
    """As "batch, loss, 3 gradients"."""
    parts = [word for word, entry in (("inputs", INPUTS), ("targets", TARGETS), ("loss", LOSS)) if entry in entries]
    for word, kind in (("gradient", GRADIENT), ("weight", WEIGHT)):
        number = sum(entry.startswith(kind) for entry in entries)
        if number:
            parts.append(counted(number, word))
    return ", ".join(parts)
