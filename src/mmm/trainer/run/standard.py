"""The hooks that most programs have, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mmm.layout import Layout
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.spec import RunSpec
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.run import core
from mmm.trainer.run.agreement import Agreement
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.hang import Hang
from mmm.trainer.run.memory_check import MemoryCheck
from mmm.trainer.run.prediction import PredictedAndMeasured
from mmm.trainer.run.resume import ResumableRecord
from mmm.trainer.run.startup import StartUp
from mmm.trainer.run.trace_picture import TracePicture
from mmm.trainer.run.trackers import Trackers


def standard_hooks(checkpoint: CheckpointOptions, profile: ProfileOptions, *before_record: Hook) -> list[Hook]:
    """A trainer's. A hook that adds to rows stands before the record."""
    return [
        MemoryCheck(),
        Agreement(),
        Hang(),
        StartUp(),
        PredictedAndMeasured(),
        *before_record,
        ResumableRecord(checkpoint),
        Trackers(profile.tracker, profile.project),
        TracePicture(),
    ]


def script_hooks() -> list[Hook]:
    """Those of a program of one's own."""
    return [Agreement(), Hang(), StartUp(), ResumableRecord()]


def start_run(
    name: str, config: Any, resolved: RunSpec | Layout, hooks: Sequence[Hook] | None = None
) -> AbstractContextManager[Run]:
    """`mmm.trainer.run.core.start_run`, for a program of one's own.

    Args:
        hooks: None for `script_hooks`.
    """
    return core.start_run(name, config, resolved, script_hooks() if hooks is None else hooks)
