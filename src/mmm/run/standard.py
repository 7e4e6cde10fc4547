"""The hooks that most programs have, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.layout import Layout
from mmm.run import run
from mmm.run.hook import Hook
from mmm.run.hooks.agreement import Agreement
from mmm.run.hooks.checkpoint import Checkpoint
from mmm.run.hooks.compiled import Compiled
from mmm.run.hooks.fingerprints import FingerprintHook
from mmm.run.hooks.hang import Hang
from mmm.run.hooks.profile import ProfileHook
from mmm.run.hooks.record import Record
from mmm.run.hooks.startup import StartUp
from mmm.run.hooks.trackers import Trackers
from mmm.run.run import Run


def trainer_hooks(
    checkpoint: Any,
    profile: Any,
    metadata: ModelMetadata | None = None,
    *before_record: Hook,
) -> list[Hook]:
    """The hooks of a trainer.

    Args:
        checkpoint: the group ``checkpoint`` of the program's flags.
        profile: the group of flags that has ``--profile`` and ``--fingerprints``.
        metadata: what each checkpoint keeps of the model, besides its tensors.
        before_record: further hooks that add to rows.
    """
    return [
        Agreement(),
        Hang(),
        StartUp(),
        Compiled(),
        # Hooks that add to rows come before the record.
        *installed_hooks(),
        *before_record,
        FingerprintHook(profile.fingerprints),
        ProfileHook(profile),
        # The record has to know whether the run resumes.
        Checkpoint(checkpoint, metadata),
        Record(),
        # Most trackers write into the folder that the record has made.
        Trackers(),
    ]


def installed_hooks() -> list[Hook]:
    """Hooks that other installed packages add to every trainer, such as the planner's prediction.

    A package names each in its entry points: group ``mmm.hooks``, a class that is called without arguments.
    """
    return [point.load()() for point in entry_points(group="mmm.hooks")]


def script_hooks() -> list[Hook]:
    """The hooks of a user's own program."""
    return [Agreement(), Hang(), StartUp(), Compiled(), Checkpoint(), Record(), Trackers()]


def start_run(
    name: str, config: Any, job: Any | Layout, hooks: Sequence[Hook] | None = None
) -> AbstractContextManager[Run]:
    """`mmm.run.run.start_run`, for a user's own program.

    Args:
        hooks: None for `script_hooks`.
    """
    return run.start_run(name, config, job, script_hooks() if hooks is None else hooks)
