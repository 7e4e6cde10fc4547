"""A candidate as the line that starts it, and as a job script of the machine's scheduler. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmm_launch.machines.machine import Machine
from mmm_launch.machines.queues import not_taken, queue_for

if TYPE_CHECKING:
    from mmm_lab.planner.candidate import Candidate
    from mmm_lab.planner.spec import ModelSpec

HOUR = 3600.0  # s
BEGIN = (". .venv/bin/activate",)
FOLDER, PROJECT = "FOLDER", "PROJECT"  # for the user to fill in
TRIAL = (
    "# 20 steps on random tokens: does the layout fit, and how fast is it? For a training, in place of the last",
    f"# two flags: --text {FOLDER} --max_iters N --checkpoint_every 100 --outdir runs/a --resume auto",
)


def trainer_flags(candidate: Candidate, spec: ModelSpec, global_batch: int, dtype: str) -> list[str]:
    """Flags of the trainer that runs the model, so that it runs this layout and no other."""
    layout, techniques = candidate.layout, candidate.techniques
    sizes = {"pp": layout.pp, "cp": layout.cp, "tp": layout.tp, "ep": layout.ep, "dp_replicate": layout.dp_replicate}
    flags = [*spec.flags]
    if spec.seq_length:
        flags += ["--seq_length", str(spec.seq_length)]
    flags += ["--global_batch_size", str(global_batch), "--dtype", dtype, "--parallel", techniques.data_parallel]
    for name, size in sizes.items():
        if size > 1:
            flags += [f"--{name}", str(size)]
    if layout.pp > 1:
        flags += ["--schedule", techniques.schedule, "--stages_per_rank", str(techniques.stages_per_rank)]
    if layout.cp > 1:
        flags += ["--cp_style", techniques.cp_style]
        flags += ["--ulysses", str(techniques.ulysses)] if techniques.ulysses else []
    for name, value, usual in (
        ("reshard_after_forward", techniques.reshard_after_forward, "auto"),
        ("activation_checkpointing", techniques.checkpointing, "none"),
    ):
        if value != usual:
            flags += [f"--{name}", str(value)]
    if candidate.trial.microbatches > 1 or layout.pp > 1:
        flags += ["--microbatches", str(candidate.trial.microbatches)]
    if spec.program == "mmm.trainer.lm":
        flags += ["--loss_chunks", str(techniques.loss_chunks)]
        flags += ["--offload"] if techniques.offload else []
    return flags


def launch_line(candidate: Candidate, spec: ModelSpec, machine: Machine, global_batch: int, dtype: str) -> str:
    """The line to copy."""
    where = ["-n", str(machine.ranks)]
    if machine.hosts > 1:
        where += ["-ppn", str(machine.ranks_per_host)]
        where += ["--hosts", "HOSTS"] if not machine.scheduler else []
    if machine.device == "cpu":
        where += ["--device", "cpu"]
    flags = trainer_flags(candidate, spec, global_batch, dtype)
    return f"launch {shlex.join(where)} python3 -m {spec.program} {shlex.join(flags)}"


def trial(line: str, spec: ModelSpec) -> list[str]:
    """A launch line that can be started as it stands, after comments: of a language model with data."""
    return [*TRIAL, f"{line} --dataset random --max_iters 20"] if spec.program == "mmm.trainer.lm" else [line]


def trial_script(line: str, spec: ModelSpec, machine: Machine) -> str:
    """The job script of a trial."""
    *about, started = trial(line, spec)
    return job_script(started, machine, begin=(*BEGIN, *about))


def job_script(
    line: str,
    machine: Machine,
    fill: Mapping[str, str] | None = None,
    begin: Sequence[str] = BEGIN,
    directives: Sequence[str] = (),
) -> str:
    """A job script that runs `line`: PBS or Slurm, as the machine has it; else a script for a shell.

    Args:
        fill: what `Machine.script` leaves open: hosts, time, queue, project. Without them it is an hour of a queue that
            takes such a job; the project is to be filled in, and the queue where none takes it.
        begin: lines of the shell before `line`. directives: further lines for the scheduler.
    """
    queue, why_not = machine.queue, ""
    if not fill:
        queue = queue_for(machine, machine.hosts, HOUR)
        why_not = not_taken(machine, queue, machine.hosts, HOUR)
    if why_not or not queue:
        queue = "QUEUE"
    words = {"hosts": str(machine.hosts), "time": "01:00:00", "queue": queue, "project": PROJECT}
    head = ["#!/bin/bash -l" if machine.scheduler == "pbs" else "#!/bin/bash"]
    for text in machine.script:
        for name, value in (words | dict(fill or {})).items():
            text = text.replace(f"{{{name}}}", value)
        head.append(text)
    head += directives
    if machine.scheduler == "pbs" and fill is None:
        head.append('cd "$PBS_O_WORKDIR"')
    if PROJECT in "\n".join(head[1:]):
        head.append(f"# {PROJECT}, the queue and the time are yours to fill in.")
    if why_not:
        head.append(f"# {why_not}.")
    if not machine.scheduler and machine.hosts > 1:
        head.append(f"# HOSTS are the names of your {machine.hosts} hosts, with commas between.")
    advice = [f"# {text}" for text in machine.advice] if machine.scheduler and machine.hosts > 1 else []
    return "\n".join([*head, *advice, *machine.setup, *begin, line, ""])
