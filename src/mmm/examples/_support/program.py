"""The run of an example, with all that goes on around it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mmm.examples._support.mistakes import GlobalBatch, MistakeOnPurpose, global_text
from mmm.layout import Layout
from mmm.run import run
from mmm.run.hook import Hook
from mmm.run.hooks.agreement import Agreement
from mmm.run.hooks.record import Record
from mmm.run.hooks.startup import StartUp
from mmm.run.options import flags_of
from mmm.run.tables import print_on_rank0
from mmm.trainer.job import Job


def start_run(
    name: str,
    config: Any,
    job: Job | Layout,
    global_batch: GlobalBatch = global_text,
    hooks: Sequence[Hook] = (),
) -> AbstractContextManager[run.Run]:
    """`mmm.run.run.start_run`: the ranks compare what has to be equal, start-up is timed, rows are recorded.

    With ``--summary`` the model is printed, and the program ends here. With ``--break`` it ends with exit code 1.

    Args:
        global_batch: what one device trains on, beside a run with ``--break``.
        hooks: further ones of the example.
    """
    if flags_of(config).get("summary"):
        assert isinstance(job, Job)
        print_on_rank0(job.summary())
        raise SystemExit(0)
    hooks = [*hooks, Agreement(), StartUp(), Record(), MistakeOnPurpose(global_batch)]
    return run.start_run(name, config, job, hooks)
