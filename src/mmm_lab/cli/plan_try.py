"""``mmm plan --dry_run`` and ``--check``: the program of a layout, on nothing, and on the devices of this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm.layout import AXES
from mmm_lab.cli.written import write_json
from mmm_launch.machines.find import measured_path
from mmm_launch.machines.machine import Machine, read

if TYPE_CHECKING:
    from mmm_lab.planner.candidate import Candidate
    from mmm_lab.planner.search import Search

CHECK_SECONDS = 900  # of each run on real ranks
CHECK_FAILED = 1
DATA = {"mmm.trainer.lm": "random", "mmm.trainer.vit": "digits", "mmm.trainer.cnn": "digits"}  # without a download


def machine_here(args: argparse.Namespace, sizes: dict[str, int]) -> Machine:
    """This host, with as many ranks as the layout has: measured by mmm machine --measure, now if it has not been.

    Raises:
        ConfigError: the flags name another machine.
    """
    for flag in ("site", "hosts", "gpu_memory"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--check runs on this host: leave --{flag} out")
    if args.machine is not None:
        machine = read(args.machine)
    else:
        path = measured_path()
        if not path.exists():
            from mmm_lab.planner.measure import measure_machine

            print(f"this machine has not been measured: mmm machine --measure {path}", flush=True)
            measure_machine(path)
        machine = read(path)
    ranks = math.prod(sizes.get(axis, 1) for axis in AXES)
    return machine.changed({"hosts": 1, "ranks_per_host": ranks if sizes else args.gpus_per_host})


def _flags(search: Search, candidate: Candidate) -> list[str]:
    """Of the trainer."""
    from mmm.runtime.device import is_available
    from mmm_lab.planner.script import trainer_flags

    spec, device = search.spec, search.machine.device
    if not spec.program:
        raise ConfigError(f"--model {spec.name}: no trainer has it, so that there is no program to try")
    flags = trainer_flags(candidate, spec, search.global_batch, search.dtype)
    data = ["--dataset", DATA[spec.program]]
    if "--dataset" in flags:
        at = flags.index("--dataset")
        flags[at : at + 2] = data
        data = []
    optimizer = ["--optimizer", search.optimizer] if search.optimizer != "adamw" else []
    return [*flags, *data, *optimizer, "--device", device if device == "cpu" or is_available(device) else "cpu"]


def dry_run(search: Search, candidate: Candidate, args: argparse.Namespace) -> int:
    """The tables of ``mmm dry-run``. Returns 0 if it fits, else 1."""
    from mmm_lab.cli.plan_program import train
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


def check(search: Search, candidate: Candidate, args: argparse.Namespace) -> int:
    """Run it by `launch`. Returns 0 if its memory is as predicted, else 1."""
    from mmm_lab.cli.plan_program import train
    from mmm_lab.planner.check import Checked, RankMemory, json_of, text_of
    from mmm_lab.planner.dry_run import dry_run as run
    from mmm_lab.planner.script import launch_line, trial

    program, flags, ranks = search.spec.program, _flags(search, candidate), search.machine.ranks
    dry = run(partial(train, program, flags), ranks)
    with tempfile.TemporaryDirectory() as folder:
        _launch([folder, program, *flags], ranks, search.machine.device)
        memory = [RankMemory(**json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in range(ranks)]
    line = launch_line(candidate, search.spec, search.machine, search.global_batch, search.dtype)
    checked = Checked(dry, memory, trial(line, search.spec)[-1])
    print(text_of(checked))
    write_json(args.json, json_of(checked))
    return 0 if checked.right else CHECK_FAILED


def _launch(words: list[str], ranks: int, device: str) -> None:
    """On a CPU with one thread a rank."""
    command = [sys.executable, "-m", "mmm_launch", "-n", str(ranks), "--device", device]
    command += ["python3", "-m", "mmm_lab.cli.plan_program", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if device == "cpu" else None
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--check: the ranks took more than {CHECK_SECONDS} s: use a smaller model or batch"
        ) from None
    if done.returncode:
        raise ConfigError(f"--check: the run failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
