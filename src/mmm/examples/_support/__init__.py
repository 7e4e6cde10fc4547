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
    from mmm.trainer.flags import run_main as run_main
    from mmm.trainer.layout import MemoryOptions as MemoryOptions
    from mmm.trainer.optimizer import make_optimizer as make_optimizer
    from mmm.trainer.options import SHARDED_SEQUENCE as SHARDED_SEQUENCE
    from mmm.trainer.options import BreakOptions as BreakOptions
    from mmm.trainer.options import TensorParallelOptions as TensorParallelOptions
    from mmm.trainer.options import Unused as Unused
    from mmm.trainer.options import parse as parse
    from mmm.trainer.resolve import Resolved as Resolved
    from mmm.trainer.resolve_plan import ResolvedPlan as ResolvedPlan
    from mmm.trainer.resolve_plan import resolve as resolve
    from mmm.trainer.resolve_text import check_own_kv_heads as check_own_kv_heads
    from mmm.trainer.resolve_text import resolve_own as resolve_own
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
    from mmm.trainer.transformer_options import ExpertOptions as ExpertOptions
    from mmm.trainer.transformer_options import Preset as Preset

__getattr__, __dir__ = lazy(
    __name__,
    {
        "mmm.examples._support.four_axes": "FourAxesOptions",
        "mmm.examples._support.image_loop": "image_steps",
        "mmm.examples._support.mistakes": "MistakeOnPurpose",
        "mmm.examples._support.by_package": "parallelize",
        "mmm.examples._support.text_options": "TextExampleOptions PlainTextProgramOptions",
        "mmm.examples._support.text_loop": "text_steps",
        "mmm.trainer.flags": "run_main",
        "mmm.trainer.layout": "MemoryOptions",
        "mmm.trainer.optimizer": "make_optimizer",
        "mmm.trainer.options": "SHARDED_SEQUENCE BreakOptions TensorParallelOptions Unused parse",
        "mmm.trainer.resolve": "Resolved",
        "mmm.trainer.resolve_plan": "ResolvedPlan resolve",
        "mmm.trainer.resolve_text": "check_own_kv_heads resolve_own",
        "mmm.trainer.run.agreement": "Agreement",
        "mmm.trainer.run.core": "Run start_run",
        "mmm.trainer.run.memory_check": "MemoryCheck",
        "mmm.trainer.run.plots": "Plots",
        "mmm.trainer.run.record": "Record",
        "mmm.trainer.run.startup": "StartUp",
        "mmm.trainer.run.tables": "print_once sharded_model stage_table",
        "mmm.trainer.transformer_options": "ExpertOptions Preset",
    },
)
