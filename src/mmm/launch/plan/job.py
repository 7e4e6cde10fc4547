"""A scheduler's job, as the launcher knows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """What a scheduler says of the job this process is in; `scheduler` "none" where there is none.

    Attributes:
        hosts: in the scheduler's order, each once.
        why: for each value that was found, the variable it came from.
        tasks: what the job asked for on each of `hosts`; empty where it did not say.
        gpus_per_host: None where the scheduler does not say.
        end_time: seconds since 1970 at which the scheduler ends the job.
        hostfile: the scheduler's own file with each host once, if it wrote one.
        notes: what was also found, and not used.
    """

    scheduler: str = "none"
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)
    tasks: tuple[int, ...] = ()
    gpus_per_host: int | None = None
    end_time: float | None = None
    hostfile: str | None = None
    notes: tuple[str, ...] = ()
