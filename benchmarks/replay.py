"""What a replayed step costs (`--replay`): CPU seconds of replayed and ordinary steps in turn, in one process.

    python3 benchmarks/replay.py [flags of mmm.trainer.lm]

Every second step is computed twice. Also measured: the same steps without --deterministic and --replay, in a run of
their own.
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

    def gradients(self, run: Any, step: Any) -> None:
        # Forward and backward, once or twice: what follows is the same in every step.
        self.steps.append(time.process_time() - self._began)


def measure(flags: list[str]) -> list[float]:
    """CPU seconds of forward and backward of each step, without the first two, which include warm-up."""
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
    plain = measure(flags)
    deterministic = measure([*flags, "--deterministic"])
    in_turn = measure([*flags, "--deterministic", "--replay", "2"])
    # Steps 3, 5, … of the run are replayed, and the two first are left out.
    replayed = in_turn[1::2]
    ordinary = in_turn[::2]
    print("CPU seconds of a step's forward and backward, median:")
    print(f"  ordinary                  {median(plain):.3f}")
    print(f"  with --deterministic      {median(deterministic):.3f}")
    print(f"  between replayed steps    {median(ordinary):.3f}")
    print(f"  replayed                  {median(replayed):.3f}  ({median(replayed) / median(ordinary):.2f} times)")


if __name__ == "__main__":
    main()
