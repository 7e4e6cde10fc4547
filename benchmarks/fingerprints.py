"""What a step with fingerprints costs, and one with deterministic algorithms: CPU seconds of steps, in one process.

    python3 benchmarks/fingerprints.py [flags of mmm.trainer.lm]

Every second step has its fingerprints taken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from mmm.run.command_line import parse
from mmm.run.hook import Hook
from mmm.trainer import lm

STEPS = 21


class CpuSeconds(Hook):
    """Keeps the CPU seconds of each step of this process, over all of its threads."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def begin(self, run: Any, step: Any) -> None:
        self._began = time.process_time()

    def finish(self, run: Any, step: Any) -> None:
        self.steps.append(time.process_time() - self._began)


def measure(flags: list[str]) -> list[float]:
    """CPU seconds of each step, without the first two, which include warm-up."""
    seconds = CpuSeconds()
    trainer_hooks = lm.trainer_hooks
    lm.trainer_hooks = lambda *args: [*trainer_hooks(*args), seconds]
    with tempfile.TemporaryDirectory() as folder:
        common = ["--device", "cpu", "--no_plots", "--max_iters", str(STEPS), "--eval_every", "0"]
        sys.argv = ["lm", *common, "--outdir", str(Path(folder) / "run"), *flags]
        lm.train(parse(lm.Config))
    lm.trainer_hooks = trainer_hooks
    return seconds.steps[2:]


def main() -> None:
    flags = sys.argv[1:]
    plain = median(measure(flags))
    deterministic = median(measure([*flags, "--deterministic"]))
    fingerprints = measure([*flags, "--fingerprints", "2"])
    print("CPU seconds of a step, median:")
    print(f"  ordinary                  {plain:.3f}")
    print(f"  with --deterministic      {deterministic:.3f}")
    # Of the steps from 2 on, 2, 4, … have fingerprints.
    report("with fingerprints", fingerprints[::2], fingerprints[1::2])


def report(name: str, steps: list[float], between: list[float]) -> None:
    """Print what some steps cost, and the steps between them."""
    cost = median(steps)
    ordinary = median(between)
    print(f"  {name:25} {cost:.3f}, the steps between them {ordinary:.3f}: {cost / ordinary:.2f} times")


if __name__ == "__main__":
    main()
