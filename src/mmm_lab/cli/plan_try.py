"""``mmm plan --dry_run``: the program of a layout, on nothing."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mmm_lab.cli.written import write_json

if TYPE_CHECKING:
    from mmm_lab.planner.candidate import Candidate
    from mmm_lab.planner.search import Search

DATA = {"mmm.trainer.lm": "random", "mmm.trainer.vit": "digits"}  # without a download


def _flags(search: Search, candidate: Candidate) -> list[str]:
    """Of the trainer."""
    from mmm.runtime.device import is_available
    from mmm_lab.planner.script import trainer_flags

    spec, device = search.spec, search.machine.device
    flags = trainer_flags(candidate, spec, search.global_batch, search.dtype)
    flags += ["--dataset", DATA[spec.program]]
    optimizer = ["--optimizer", search.optimizer] if search.optimizer != "adamw" else []
    return [*flags, *optimizer, "--device", device if device == "cpu" or is_available(device) else "cpu"]


def dry_run(search: Search, candidate: Candidate, args: argparse.Namespace) -> int:
    """The tables of ``mmm dry-run``. Returns 0 if it fits, else 1."""
    from mmm_lab.planner import dry_run_report
    from mmm_lab.planner.dry_run import dry_run as run

    flags = _flags(search, candidate)
    found = run(partial(train, search.spec.program, flags), search.machine.ranks)
    budget = int(search.machine.budget)
    print(dry_run_report.text_of(found, budget))
    command = ["mmm", "dry-run", str(search.machine.ranks), "--", "python3", "-m", search.spec.program, *flags]
    print(f"\n{shlex.join(command)}")
    write_json(args.json, dry_run_report.json_of(found, budget, command))
    return 0 if dry_run_report.verdict(found, budget)[0] else 1


def train(program: str, flags: Sequence[str]) -> None:
    """A few steps of a trainer. program: its module."""
    from mmm.trainer.config.command_line import for_a_few_steps, parse

    trainer = importlib.import_module(program)
    sys.argv = [program, *flags]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(for_a_few_steps(parse(trainer.Config)))
