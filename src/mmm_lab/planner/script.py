"""The line that starts a candidate, and a job script of the machine's scheduler. Imports no torch."""

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
# Placeholders for the user to fill in.
FOLDER = "FOLDER"
PROJECT = "PROJECT"
TRIAL = (
    "# 20 steps on random tokens: does the layout fit, and how fast is it? To train, replace the last two flags",
    f"# by: --text {FOLDER} --max_iters N --checkpoint_every 100 --outdir runs/a --resume auto",
)


def flags_of(layout: Layout, techniques: Techniques) -> dict[str, object]:
    """Flags of a trainer, by name, for a layout with its techniques. Those with their default value are left out."""
    default = Techniques()
    flags: dict[str, object] = {"parallel": techniques.data_parallel}
    for axis in ("pp", "cp", "tp", "ep", "dp_replicate"):
        if getattr(layout, axis) > 1:
            flags[axis] = getattr(layout, axis)
    if layout.pp > 1:
        # A trainer has defaults for these, but the plan counts with its own.
        flags |= {"schedule": techniques.schedule, "stages_per_rank": techniques.stages_per_rank}
    if layout.cp > 1:
        flags |= {"cp_style": techniques.cp_style, "ulysses": techniques.ulysses}
    if techniques.reshard_after_forward != default.reshard_after_forward:
        flags["reshard_after_forward"] = techniques.reshard_after_forward
    if techniques.checkpointing != default.checkpointing:
        flags["activation_checkpointing"] = techniques.checkpointing
    return flags


def in_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as arguments of a command line. Those that are None are left out; True has no value."""
    argv = []
    for name, value in flags.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None:
            argv += [f"--{name}", str(value)]
    return argv


def trainer_flags(
    candidate: Candidate,
    spec: ModelSpec,
    global_batch: int,
    dtype: str,
) -> list[str]:
    """Flags with which the model's trainer runs this layout and no other."""
    techniques = candidate.techniques
    count = candidate.trial.microbatches
    flags = {
        "seq_length": spec.seq_length or None,
        "global_batch_size": global_batch,
        "dtype": dtype,
        **flags_of(candidate.layout, techniques),
        "microbatches": count if count > 1 or candidate.layout.pp > 1 else None,
    }
    if spec.program == "mmm.trainer.lm":
        flags |= {"loss_chunks": techniques.loss_chunks, "offload": techniques.offload or None}
    return [*spec.flags, *in_words(flags)]


def launch_line(
    candidate: Candidate,
    spec: ModelSpec,
    machine: Machine,
    global_batch: int,
    dtype: str,
) -> str:
    """The ``launch …`` line to copy."""
    argv = ["launch", "-n", str(machine.ranks)]
    if machine.hosts > 1:
        argv += ["-ppn", str(machine.ranks_per_host)]
        if not machine.scheduler:
            argv += ["--hosts", "HOSTS"]
    if machine.device == "cpu":
        argv += ["--device", "cpu"]
    argv += [
        "python3",
        "-m",
        spec.program,
        *trainer_flags(
            candidate,
            spec,
            global_batch,
            dtype,
        ),
    ]
    return shlex.join(argv)


def trial(line: str, spec: ModelSpec) -> list[str]:
    """A launch line that runs as it is. For a language model it gets random data, and comments come before it."""
    if spec.program == "mmm.trainer.lm":
        return [*TRIAL, f"{line} --dataset random --max_iters 20"]
    return [line]


def trial_script(line: str, spec: ModelSpec, machine: Machine) -> str:
    """The job script of a trial."""
    *comments, command = trial(line, spec)
    return job_script(command, machine, begin=(*BEGIN, *comments))


def job_script(
    line: str,
    machine: Machine,
    fill: Mapping[str, str] | None = None,
    begin: Sequence[str] = BEGIN,
    directives: Sequence[str] = (),
) -> str:
    """A job script that runs `line`, for PBS, Slurm or Flux; for a shell if the machine has no scheduler.

    Args:
        fill: values for what `Machine.script` leaves open: hosts, time, queue, project. Without it the job takes an
            hour of a queue that accepts it. The user fills in the project, and the queue if none accepts the job.
        begin: lines of the shell before `line`.
        directives: additional lines for the scheduler.
    """
    queue = machine.queue
    why_not = ""
    if not fill:
        queue = queue_for(machine, machine.hosts, HOUR)
        why_not = not_taken(machine, queue, machine.hosts, HOUR)
    if why_not or not queue:
        queue = "QUEUE"
    values = {
        "hosts": str(machine.hosts),
        "time": "60m" if machine.scheduler == "flux" else "01:00:00",
        "queue": queue,
        "project": PROJECT,
        **(fill or {}),
    }
    # PBS starts a job without the user's profile, which a login shell reads.
    head = ["#!/bin/bash -l" if machine.scheduler == "pbs" else "#!/bin/bash"]
    for text in machine.script:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        head.append(text)
    head += directives
    # A PBS job begins in the home folder, a Slurm job where it was submitted.
    if machine.scheduler == "pbs" and fill is None:
        head.append('cd "$PBS_O_WORKDIR"')
    # Only if a line of the machine asks for a project.
    if PROJECT in "\n".join(head[1:]):
        head.append(f"# {PROJECT}, the queue and the time are yours to fill in.")
    if why_not:
        head.append(f"# {why_not}.")
    if not machine.scheduler and machine.hosts > 1:
        head.append(f"# HOSTS are the names of your {machine.hosts} hosts, with commas between.")
    if machine.scheduler and machine.hosts > 1:
        head += [f"# {text}" for text in machine.advice]
    return "\n".join([*head, *machine.setup, *begin, line, ""])
