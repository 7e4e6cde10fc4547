"""What the examples and trainers share: options, one run's life, optimizers.

The names below are what a program of one's own needs (docs/your-script.md). Each is imported when it is asked for: a
program pays for what it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmm.runtime.ranks import whoami
    from mmm.trainer.build import build_model
    from mmm.trainer.flags import run_main
    from mmm.trainer.optimizer import make_optimizer
    from mmm.trainer.options import BaseOptions, BatchOptions, RunOptions, parse
    from mmm.trainer.run import Run
    from mmm.trainer.save import save_model
    from mmm.trainer.start import start_run
    from mmm.trainer.steps import evaluate, train_steps

__all__ = [
    "BaseOptions",
    "BatchOptions",
    "Run",
    "RunOptions",
    "build_model",
    "evaluate",
    "make_optimizer",
    "parse",
    "run_main",
    "save_model",
    "start_run",
    "train_steps",
    "whoami",
]

_PLACES = {
    "BaseOptions": "mmm.trainer.options",
    "BatchOptions": "mmm.trainer.options",
    "Run": "mmm.trainer.run",
    "RunOptions": "mmm.trainer.options",
    "build_model": "mmm.trainer.build",
    "evaluate": "mmm.trainer.steps",
    "make_optimizer": "mmm.trainer.optimizer",
    "parse": "mmm.trainer.options",
    "run_main": "mmm.trainer.flags",
    "save_model": "mmm.trainer.save",
    "start_run": "mmm.trainer.start",
    "train_steps": "mmm.trainer.steps",
    "whoami": "mmm.runtime.ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
