"""The program that ``mmm plan`` runs, in a dry run and on real ranks: a trainer, for some steps.

launch -n N python3 -m mmm.cli.plan_program FOLDER memory|time MACHINE PROGRAM FLAGS…
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

TIMED_STEPS = 6


def train(program: str, flags: Sequence[str], outdir: Path | None = None, steps: int | None = None) -> None:
    """Some steps of a trainer.

    Args:
        program: module. outdir: of its record. steps: None for those of a dry run.
    """
    from mmm.trainer.config.command_line import for_a_few_steps, parse
    from mmm.trainer.config.run import replace_flags

    trainer = importlib.import_module(program)
    sys.argv = [program, *flags]
    config = for_a_few_steps(parse(trainer.Config))
    config = replace_flags(config, outdir=outdir, **({} if steps is None else {"max_iters": steps}))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(config)


def main(words: Sequence[str]) -> None:
    """On a real rank: run the program, and write what was found to FOLDER/KIND-RANK.json."""
    from mmm.plan.check import CheckedRun
    from mmm.plan.machine import load
    from mmm.plan.measured import Stopwatch
    from mmm.runtime.observer import observing
    from mmm.runtime.ranks import whoami

    folder, kind, machine, program, *flags = words
    watch: CheckedRun | Stopwatch
    watch = CheckedRun(load(machine, "--machine")) if kind == "memory" else Stopwatch()
    with observing(watch):
        train(program, flags, Path(folder) / kind, None if kind == "memory" else TIMED_STEPS)
    if isinstance(watch, Stopwatch):
        found = {"seconds": watch.seconds}
    else:
        assert watch.found is not None, "the program has started no run"
        found = asdict(watch.found)
    (Path(folder) / f"{kind}-{whoami().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
