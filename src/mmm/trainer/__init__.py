"""The programs `lm`, `vit` and `cnn`, and what they share with the examples: flags, one run's life, optimizers.

The names below are what a program of one's own needs (docs/your-script.md). Each is imported when it is asked for: a
program pays for what it uses.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.optim.adamw import make_optimizer
    from mmm.runtime.ranks import whoami
    from mmm.trainer.config.command_line import parse, run_main
    from mmm.trainer.config.run import BaseOptions, BatchOptions, RunOptions
    from mmm.trainer.config.training import CheckpointOptions
    from mmm.trainer.loop.loader_steps import evaluate, train_steps
    from mmm.trainer.loop.save import save_model
    from mmm.trainer.run.build import build_model
    from mmm.trainer.run.core import Hook, Run
    from mmm.trainer.run.standard import script_hooks, start_run

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.runtime.ranks": "whoami",
        "mmm.trainer.config.command_line": "parse run_main",
        "mmm.trainer.config.run": "BaseOptions BatchOptions RunOptions",
        "mmm.trainer.config.training": "CheckpointOptions",
        "mmm.trainer.loop.loader_steps": "evaluate train_steps",
        "mmm.trainer.loop.save": "save_model",
        "mmm.optim.adamw": "make_optimizer",
        "mmm.trainer.run.build": "build_model",
        "mmm.trainer.run.core": "Hook Run",
        "mmm.trainer.run.standard": "script_hooks start_run",
    },
)
