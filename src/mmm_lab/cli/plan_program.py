"""The program that ``mmm plan`` runs, in a dry run and on real ranks: a trainer, for some steps.

launch -n N python3 -m mmm_lab.cli.plan_program FOLDER PROGRAM FLAGS…
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


def train(program: str, flags: Sequence[str], outdir: Path | None = None) -> None:
    """The few steps of a dry run, of a trainer.

    Args:
        program: module. outdir: of its record.
    """
    from mmm.trainer.config.command_line import for_a_few_steps, parse
    from mmm.trainer.config.run import replace_flags

    trainer = importlib.import_module(program)
    sys.argv = [program, *flags]
    config = replace_flags(for_a_few_steps(parse(trainer.Config)), outdir=outdir)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(config)


def main(words: Sequence[str]) -> None:
    """On a real rank: run the program, and write its memory to FOLDER/RANK.json."""
    from mmm.runtime.observer import observing
    from mmm.runtime.ranks import whoami
    from mmm_lab.planner.check import CheckedRun

    folder, program, *flags = words
    watch = CheckedRun()
    with observing(watch):
        train(program, flags, Path(folder) / "run")
    assert watch.memory is not None, "the program has started no run"
    (Path(folder) / f"{whoami().rank}.json").write_text(json.dumps(asdict(watch.memory)))


if __name__ == "__main__":
    main(sys.argv[1:])
