"""Starts the run of an example, with the hooks that every example has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mmm.examples._support.mistakes import GlobalBatch, MistakeOnPurpose, global_text
from mmm.layout import Layout
from mmm.run import run
from mmm.run.folder import Folder
from mmm.run.hook import Hook
from mmm.run.hooks.agreement import Agreement
from mmm.run.hooks.bar import Bar
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
    """As `mmm.run.run.start_run`. The ranks compare what has to be equal, start-up is timed, and rows are recorded.

    With ``--summary`` the model is printed, and the program ends here. With ``--break`` it ends with exit code 1.

    Args:
        global_batch: the batch that one device trains on, which a run with ``--break`` is compared with.
        hooks: additional hooks of the example.
    """
    if flags_of(config).get("summary"):
        assert isinstance(job, Job)
        print_on_rank0(job.summary())
        raise SystemExit(0)
    all_hooks = [
        *hooks,
        Agreement(),
        StartUp(),
        Bar(),
        MistakeOnPurpose(global_batch),
    ]
    return run.start_run(name, config, job, Folder(), all_hooks)
