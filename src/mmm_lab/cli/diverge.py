"""``mmm diverge RUN_A RUN_B``: the first step at which two runs part, on whatever layouts, and where in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm.history.record.fingerprints import GRADIENT, INPUTS, LOSS, TARGETS, WEIGHT, has_fingerprints
from mmm.outside import printable_lines
from mmm.units import counted
from mmm_lab.cli.parser import Parser

if TYPE_CHECKING:
    from mmm_lab.runs.diverge import Divergence
    from mmm_lab.runs.losses import LossComparison

EPILOG = """\
Two runs with --fingerprints 1, or every so many steps, are compared by sums that do not depend on the layout: of the
batch, the loss, each gradient from the last layer back, and each weight after the step. Of other runs only the losses
are compared, and the other columns of their records that say how well the model fits.
With --tolerance 0 their bits have to be equal; this is the default for two exact runs (--exact) of one partition.
docs/diverge.md says more.

examples:
  mmm diverge runs/a runs/b
  mmm diverge runs/a runs/b --tolerance 1e-6
  mmm diverge runs/a runs/b --tolerance 0
exit codes: 0 the same, 1 they part, 2 they cannot be compared, or wrong arguments
"""
# How an entry is called in a list of several: those that a step has once, and those of each parameter.
ONCE = {INPUTS: "inputs", TARGETS: "targets", LOSS: "loss"}
OF_PARAMETERS = {GRADIENT: "gradient", WEIGHT: "weight"}


def main(argv: list[str]) -> int:
    """Print where two runs part. Returns the exit code. Raises UserError."""
    parser = Parser(prog="mmm diverge", description="Where do two runs part?", epilog=EPILOG)
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="the relative difference from which on they part; 0: equal bits (default, by dtype: 1e-9, 1e-3 or 0.05)",
    )
    args = parser.parse_args(argv)
    # Written so that NaN is refused.
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"--tolerance {args.tolerance:g}: it must be a number from 0 on")
    from mmm_lab.runs.diverge import diverge
    from mmm_lab.runs.losses import compare_losses

    run_a, run_b = args.runs
    without = [str(run) for run in args.runs if not has_fingerprints(run)]
    if without:
        losses = compare_losses(run_a, run_b, args.tolerance)
        print(printable_lines(losses_report(losses, args.runs, without)))
        return int(losses.step is not None)
    result = diverge(run_a, run_b, args.tolerance)
    print(printable_lines(report(result, args.runs)))
    return int(result.step is not None)


def losses_report(result: LossComparison, runs: Sequence[Path], without: Sequence[str]) -> str:
    """Returns the text that the command prints of runs without fingerprints.

    Args:
        without: those runs.
    """
    steps = counted(len(result.largest), "step")
    worst = max(result.largest, key=result.largest.__getitem__)
    difference = result.largest[worst]
    verdict = f"the same losses: {steps}, to {difference:.0e} (≤ {result.tolerance:.0e})"
    if result.step is not None:
        a, b = result.values
        off = f"off by {result.difference:.1e} (> {result.tolerance:.0e})"
        verdict = f"the losses part at step {result.step}: {result.column} is {a:.9g} and {b:.9g}, {off}"
    lines = [verdict]
    for run, about in zip(runs, result.about, strict=True):
        lines.append(f"  {run}: {about}")
    if result.step is not None:
        before = [off for step, off in result.largest.items() if step < result.step]
        lines.append(f"  before it  {counted(len(before), 'step')}, to {max(before, default=0.0):.0e}")
        lines.append(f"  largest    {difference:.1e} at step {worst}, of {steps}")
    lines.append(f"  compared   only {', '.join(result.columns)}: no fingerprints in {' and '.join(without)}")
    lines.append("             with --fingerprints 1 in both, each gradient and weight is compared too")
    return "\n".join(lines)


def report(result: Divergence, runs: Sequence[Path]) -> str:
    """Returns the text that the command prints."""
    about = []
    for run, header in zip(runs, result.headers, strict=True):
        ranks = counted(header.ranks, "rank")
        about.append(f"  {run}: layout {header.layout}, {header.dtype}, {ranks}")
    if result.step is None or result.entry is None:
        # Step -1 stands for the weights before the first step.
        n_steps = sum(step >= 0 for step in result.largest)
        steps = counted(n_steps, "step")
        largest = max(result.largest.values())
        verdict = f"the same: {steps}, to {largest:.0e} (≤ {result.tolerance:.0e})"
        if result.tolerance == 0:
            verdict = f"the same bits: {steps}"
        return "\n".join([verdict, *about])
    where = f"at step {result.step}"
    if result.step < 0:
        where = "before the first step"
    entry = result.entry.removeprefix("the ")
    kind = "other bits, off by" if result.tolerance == 0 else "off by"
    lines = [f"they part {where}, at the {entry}: {kind} {result.difference:.1e}"]
    lines += about
    # A difference that has grown is rounding; one that comes at once is a mistake.
    lines.append(f"  before it  {_before(result)}")
    if result.step >= 0:
        lines.append(f"  the same   {_counted(result.same)}")
    lines.append(f"  off too    {_counted(result.likewise)}")
    # A loss that differs has come out of blocks whose outputs differ: the first of them says more.
    if result.block and result.entry == LOSS:
        lines.append(f"  begins at  the {result.block}")
    if result.ranks:
        lines.append(f"  ranks      {result.ranks}")
    return "\n".join(lines)


def _before(result: Divergence) -> str:
    """Says how large the differences were before the step at which the runs part."""
    earlier = [step for step in result.largest if step != result.step]
    if not earlier:
        return "nothing was compared"
    if result.tolerance == 0:
        return "the same bits"
    first = earlier[0]
    last = earlier[-1]
    text = f"largest difference {result.largest[first]:.0e} at step {first}"
    if last != first:
        text += f", {result.largest[last]:.0e} at step {last}"
    # Step -1 are the weights before the first step.
    text = text.replace("at step -1", "in the initial weights")
    if result.at_once:
        return f"{text}: it came at once"
    return f"{text}: it has grown, as rounding does"


def _counted(entries: Sequence[str]) -> str:
    """Counts the entries by kind, as "batch, loss, 3 gradients"."""
    kinds = []
    for entry, word in ONCE.items():
        if entry in entries:
            kinds.append(word)
    for prefix, word in OF_PARAMETERS.items():
        count = sum(entry.startswith(prefix) for entry in entries)
        if count:
            kinds.append(counted(count, word))
    return ", ".join(kinds) or "nothing"
