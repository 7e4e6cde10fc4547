"""The programs `lm`, `vit` and `cnn`, and what they share with the examples: flags, one run's life, optimizers.

The names below are what a program of one's own needs (docs/your-script.md). Each is imported when it is asked for: a
program pays for what it uses.
"""

# For type checkers the names are imported below.
# ruff: noqa: F401
from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.optim.adamw import make_optimizer
    from mmm.run.build import build_model
    from mmm.run.command_line import parse, run_main
    from mmm.run.hook import Hook
    from mmm.run.run import Run
    from mmm.run.save_model import save_model
    from mmm.run.standard import start_run
    from mmm.runtime.ranks import whoami

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.runtime.ranks": "whoami",
        "mmm.run.command_line": "parse run_main",
        "mmm.run.save_model": "save_model",
        "mmm.optim.adamw": "make_optimizer",
        "mmm.run.build": "build_model",
        "mmm.run.hook": "Hook",
        "mmm.run.run": "Run",
        "mmm.run.standard": "start_run",
    },
)
