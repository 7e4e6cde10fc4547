"""What an example takes from the package besides its technique: flags, and a run around its steps."""

from typing import TYPE_CHECKING

from mmm.lazy import lazy

if TYPE_CHECKING:
    from mmm.examples._support.by_package import parallelize as parallelize
    from mmm.examples._support.four_axes import FourAxesOptions as FourAxesOptions
    from mmm.examples._support.image_loop import image_steps as image_steps
    from mmm.examples._support.mistakes import MistakeOnPurpose as MistakeOnPurpose
    from mmm.examples._support.text_loop import text_steps as text_steps
    from mmm.examples._support.text_options import PlainTextProgramOptions as PlainTextProgramOptions
    from mmm.examples._support.text_options import TextExampleOptions as TextExampleOptions
    from mmm.trainer.config.flags import run_main as run_main
    from mmm.trainer.config.layout import MemoryOptions as MemoryOptions
    from mmm.trainer.config.options import SHARDED_SEQUENCE as SHARDED_SEQUENCE
    from mmm.trainer.config.options import BreakOptions as BreakOptions
    from mmm.trainer.config.options import TensorParallelOptions as TensorParallelOptions
    from mmm.trainer.config.options import Unused as Unused
    from mmm.trainer.config.options import parse as parse
    from mmm.trainer.config.resolve import Resolved as Resolved
    from mmm.trainer.config.resolve_plan import ResolvedPlan as ResolvedPlan
    from mmm.trainer.config.resolve_plan import resolve as resolve
    from mmm.trainer.config.resolve_text import check_own_kv_heads as check_own_kv_heads
    from mmm.trainer.config.resolve_text import resolve_own as resolve_own
    from mmm.trainer.config.transformer_options import ExpertOptions as ExpertOptions
    from mmm.trainer.config.transformer_options import Preset as Preset
    from mmm.trainer.optim.optimizer import make_optimizer as make_optimizer
    from mmm.trainer.run.agreement import Agreement as Agreement
    from mmm.trainer.run.core import Run as Run
    from mmm.trainer.run.core import start_run as start_run
    from mmm.trainer.run.memory_check import MemoryCheck as MemoryCheck
    from mmm.trainer.run.plots import Plots as Plots
    from mmm.trainer.run.record import Record as Record
    from mmm.trainer.run.startup import StartUp as StartUp
    from mmm.trainer.run.tables import print_once as print_once
    from mmm.trainer.run.tables import sharded_model as sharded_model
    from mmm.trainer.run.tables import stage_table as stage_table

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.examples._support.four_axes": "FourAxesOptions",
        "mmm.examples._support.image_loop": "image_steps",
        "mmm.examples._support.mistakes": "MistakeOnPurpose",
        "mmm.examples._support.by_package": "parallelize",
        "mmm.examples._support.text_options": "TextExampleOptions PlainTextProgramOptions",
        "mmm.examples._support.text_loop": "text_steps",
        "mmm.trainer.config.flags": "run_main",
        "mmm.trainer.config.layout": "MemoryOptions",
        "mmm.trainer.optim.optimizer": "make_optimizer",
        "mmm.trainer.config.options": "SHARDED_SEQUENCE BreakOptions TensorParallelOptions Unused parse",
        "mmm.trainer.config.resolve": "Resolved",
        "mmm.trainer.config.resolve_plan": "ResolvedPlan resolve",
        "mmm.trainer.config.resolve_text": "check_own_kv_heads resolve_own",
        "mmm.trainer.run.agreement": "Agreement",
        "mmm.trainer.run.core": "Run start_run",
        "mmm.trainer.run.memory_check": "MemoryCheck",
        "mmm.trainer.run.plots": "Plots",
        "mmm.trainer.run.record": "Record",
        "mmm.trainer.run.startup": "StartUp",
        "mmm.trainer.run.tables": "print_once sharded_model stage_table",
        "mmm.trainer.config.transformer_options": "ExpertOptions Preset",
    },
)
