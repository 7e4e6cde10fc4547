"""``mmm diverge RUN_A RUN_B``: the first step at which two runs part, on whatever layouts, and where in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm.history.record.fingerprints import GRADIENT, INPUTS, TARGETS, WEIGHT
from mmm.outside import printable_lines
from mmm.units import counted
from mmm_lab.cli.parser import Parser

if TYPE_CHECKING:
    from mmm_lab.runs.diverge import Divergence

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
# How an entry is called in a list of several; those of parameters are counted.
ONCE = {INPUTS: "inputs", TARGETS: "targets"}
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

    run_a, run_b = args.runs
    result = diverge(run_a, run_b, args.tolerance)
    print(printable_lines(report(result, args.runs)))
    return int(result.step is not None)


def report(result: Divergence, runs: Sequence[Path]) -> str:
    """Returns the text that the command prints."""
    lines = [_verdict(result)]
    for run, about in zip(runs, result.about, strict=True):
        lines.append(f"  {run}: {about}")
    if result.step is not None:
        # A difference that has grown is rounding; one that comes at once is a mistake.
        lines.append(f"  before it  {_before(result)}")
        if result.step >= 0:
            lines.append(f"  the same   {_counted(result.same)}")
        lines.append(f"  off too    {_counted(result.likewise)}")
    if result.ranks:
        lines.append(f"  ranks      {result.ranks}")
    if result.columns:
        lines.append(f"  compared   only {', '.join(result.columns)}: not both runs have fingerprints")
        lines.append("             with --fingerprints 1 in both, each gradient and weight is compared too")
    return "\n".join(lines)


def _verdict(result: Divergence) -> str:
    bits = result.tolerance == 0 and not result.columns
    if result.step is None:
        # Step -1 stands for the weights before the first step.
        steps = counted(sum(step >= 0 for step in result.largest), "step")
        if bits:
            return f"the same bits: {steps}"
        same = "the same losses" if result.columns else "the same"
        return f"{same}: {steps}, to {max(result.largest.values()):.0e} (≤ {result.tolerance:.0e})"
    where = f"at step {result.step}"
    if result.step < 0:
        where = "before the first step"
    kind = "other bits, off by" if bits else "off by"
    verdict = f"they part {where}, at the {result.entry.removeprefix('the ')}: {kind} {result.difference:.1e}"
    if result.values:
        a, b = result.values
        verdict += f", {a:.9g} and {b:.9g}"
    return verdict


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
    """Counts the entries by kind, as "inputs, loss, 3 gradients"."""
    kinds = []
    for entry in entries:
        if not entry.startswith(tuple(OF_PARAMETERS)):
            kinds.append(ONCE.get(entry, entry))
    for prefix, word in OF_PARAMETERS.items():
        count = sum(entry.startswith(prefix) for entry in entries)
        if count:
            kinds.append(counted(count, word))
    return ", ".join(kinds) or "nothing"
