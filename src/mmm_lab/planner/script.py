"""A candidate as the line that starts it, and as a job script of the machine's scheduler. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmm.layout import Layout, Techniques
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


def flags_of(layout: Layout, techniques: Techniques) -> dict[str, object]:
    """Flags of a trainer, by name, for a layout with its techniques; what is as usual is left out."""
    usual = Techniques()
    flags: dict[str, object] = {"parallel": techniques.data_parallel}
    for axis in ("pp", "cp", "tp", "ep", "dp_replicate"):
        if getattr(layout, axis) > 1:
            flags[axis] = getattr(layout, axis)
    if layout.pp > 1:
        flags |= {"schedule": techniques.schedule, "stages_per_rank": techniques.stages_per_rank}
    if layout.cp > 1:
        flags |= {"cp_style": techniques.cp_style, "ulysses": techniques.ulysses}
    if techniques.reshard_after_forward != usual.reshard_after_forward:
        flags["reshard_after_forward"] = techniques.reshard_after_forward
    if techniques.checkpointing != usual.checkpointing:
        flags["activation_checkpointing"] = techniques.checkpointing
    return flags


def in_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line; those that are None are left out."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def trainer_flags(candidate: Candidate, spec: ModelSpec, global_batch: int, dtype: str) -> list[str]:
    """Flags of the trainer that runs the model, so that it runs this layout and no other."""
    layout, techniques, count = candidate.layout, candidate.techniques, candidate.trial.microbatches
    flags = {
        "seq_length": spec.seq_length or None,
        "global_batch_size": global_batch,
        "dtype": dtype,
        **flags_of(layout, techniques),
        "microbatches": count if count > 1 or layout.pp > 1 else None,
    }
    if spec.program == "mmm.trainer.lm":
        flags |= {"loss_chunks": techniques.loss_chunks, "offload": techniques.offload or None}
    return [*spec.flags, *in_words(flags)]


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
