"""What an example takes from the package besides its technique: flags, and a run around its steps.

The names are loaded when they are used, so that an example does not import what it does not need.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.data.text.text_data import TextData
    from mmm.examples._support.by_package import parallelize_by_package, resolve
    from mmm.examples._support.fsdp import sum_gradients
    from mmm.examples._support.image_loop import (
        evaluate_net,
        global_images,
        image_steps,
        without_labels,
    )
    from mmm.examples._support.mistakes import BreakOptions, for_a_mistake, main, parse
    from mmm.examples._support.program import start_run
    from mmm.examples._support.text import (
        LEFT_OUT,
        SMALL,
        PlainTextConfig,
        TensorParallelOptions,
        TextConfig,
        check_kv_heads,
        fit,
        load_text,
        resolve_own,
        sizes_of,
        text_steps,
        validation_loss,
    )
    from mmm.optim.adamw import make_optimizer
    from mmm.run.run import Run
    from mmm.run.tables import sharded_model, stage_table
    from mmm.trainer.config import Evaluation, Model, Optimizer, Text, techniques_of
    from mmm.trainer.job import Job

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.examples._support.by_package": "parallelize_by_package resolve",
        "mmm.examples._support.fsdp": "sum_gradients",
        "mmm.examples._support.image_loop": "global_images image_steps evaluate_net without_labels",
        "mmm.examples._support.mistakes": "BreakOptions for_a_mistake main parse",
        "mmm.examples._support.program": "start_run",
        "mmm.examples._support.text": "LEFT_OUT SMALL PlainTextConfig TensorParallelOptions TextConfig check_kv_heads "
        "fit load_text resolve_own sizes_of text_steps validation_loss",
        "mmm.trainer.config": "Evaluation Model Optimizer Text techniques_of",
        "mmm.data.text.text_data": "TextData",
        "mmm.trainer.job": "Job",
        "mmm.optim.adamw": "make_optimizer",
        "mmm.run.run": "Run",
        "mmm.run.tables": "sharded_model stage_table",
    },
)
