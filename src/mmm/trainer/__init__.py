"""What the examples and trainers share: options, one run's life, optimizers.

The names below are what a program of one's own needs (docs/your-script.md). Each is imported when it is asked for: a
program pays for what it uses.
"""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.runtime.ranks import whoami as whoami
    from mmm.trainer.config.flags import run_main as run_main
    from mmm.trainer.config.options import BaseOptions as BaseOptions
    from mmm.trainer.config.options import BatchOptions as BatchOptions
    from mmm.trainer.config.options import RunOptions as RunOptions
    from mmm.trainer.config.options import parse as parse
    from mmm.trainer.loop.loader_steps import evaluate as evaluate
    from mmm.trainer.loop.loader_steps import train_steps as train_steps
    from mmm.trainer.loop.save import save_model as save_model
    from mmm.trainer.optim.optimizer import make_optimizer as make_optimizer
    from mmm.trainer.run.build import build_model as build_model
    from mmm.trainer.run.core import Hook as Hook
    from mmm.trainer.run.core import Run as Run
    from mmm.trainer.run.standard import script_hooks as script_hooks
    from mmm.trainer.run.standard import start_run as start_run

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.runtime.ranks": "whoami",
        "mmm.trainer.run.build": "build_model",
        "mmm.trainer.config.flags": "run_main",
        "mmm.trainer.optim.optimizer": "make_optimizer",
        "mmm.trainer.config.options": "BaseOptions BatchOptions RunOptions parse",
        "mmm.trainer.run.core": "Hook Run",
        "mmm.trainer.loop.save": "save_model",
        "mmm.trainer.run.standard": "script_hooks start_run",
        "mmm.trainer.loop.loader_steps": "evaluate train_steps",
    },
)
