"""The run of an example, with all that goes on around it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mmm.examples._support.mistakes import MistakeOnPurpose
from mmm.layout import Layout
from mmm.trainer.config.run import flags_of
from mmm.trainer.job import Job
from mmm.trainer.run import core
from mmm.trainer.run.agreement import Agreement
from mmm.trainer.run.record import Record
from mmm.trainer.run.startup import StartUp
from mmm.trainer.run.tables import print_on_rank0


def start_run(name: str, config: Any, job: Job | Layout) -> AbstractContextManager[core.Run]:
    """`mmm.trainer.run.core.start_run`: the ranks compare what has to be equal, start-up is timed, rows are recorded.

    With ``--summary`` the model is printed, and the program ends here. With ``--break`` it ends with exit code 1.
    """
    if flags_of(config).get("summary"):
        assert isinstance(job, Job)
        print_on_rank0(job.summary())
        raise SystemExit(0)
    hooks = [Agreement(), StartUp(), Record(), MistakeOnPurpose()]
    return core.start_run(name, config, job, hooks)
