"""The hooks that most programs have, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

from mmm.layout import Layout
from mmm.run import run
from mmm.run.checkpoints import Checkpoints
from mmm.run.folder import Folder
from mmm.run.hook import Hook
from mmm.run.hooks.agreement import Agreement
from mmm.run.hooks.bar import Bar
from mmm.run.hooks.compiled import Compiled
from mmm.run.hooks.fingerprints import FingerprintHook
from mmm.run.hooks.hang import Hang
from mmm.run.hooks.profile import ProfileHook
from mmm.run.hooks.startup import StartUp
from mmm.run.hooks.trackers import Trackers
from mmm.run.options import checkpoint_options
from mmm.run.run import Run


def trainer_hooks(profile: Any, *more: Hook) -> list[Hook]:
    """The hooks of a trainer.

    Args:
        profile: the group of flags that has ``--profile`` and ``--fingerprints``.
        more: further hooks.
    """
    return [
        # What is cheap and refuses comes first.
        Agreement(),
        Hang(),
        StartUp(),
        Bar(),
        Compiled(),
        *installed_hooks(),
        *more,
        FingerprintHook(profile.fingerprints),
        ProfileHook(profile),
        # Takes the rows that the others have added to.
        Trackers(),
    ]


def installed_hooks() -> list[Hook]:
    """Hooks that other installed packages add to every trainer, such as the planner's prediction.

    A package names each in its entry points: group ``mmm.hooks``, a class that is called without arguments.
    """
    return [point.load()() for point in entry_points(group="mmm.hooks")]


def start_run(name: str, config: Any, job: Any | Layout, hooks: Sequence[Hook] = ()) -> AbstractContextManager[Run]:
    """`mmm.run.run.start_run`, for a user's own program.

    Args:
        hooks: hooks of the program's own, beside those that most programs have.
    """
    options = checkpoint_options(config)
    folder = Folder(None if options is None else Checkpoints(options))
    all_hooks = [Agreement(), Hang(), StartUp(), Bar(), Compiled(), *hooks, Trackers()]
    return run.start_run(name, config, job, folder, all_hooks)
