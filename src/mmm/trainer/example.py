"""What an example on text takes from the package besides its technique: flags, and a run around its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmm.models.experts import has_experts
from mmm.parallel import Mesh, apply, build_mesh, materialize
from mmm.runtime.process_group import gather_floats
from mmm.trainer.flags import run_main
from mmm.trainer.layout import TensorParallelOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import PIPELINE, SHARDED_SEQUENCE, BreakOptions, Need, Unused, parse
from mmm.trainer.report import print_once, sharded_model, stage_table
from mmm.trainer.resolve import Resolved
from mmm.trainer.run import Run, start_run
from mmm.trainer.steps import text_steps
from mmm.trainer.text import ExpertOptions, Preset, TextProgramOptions, ValidationOptions, resolve

__all__ = [
    "PIPELINE",
    "SHARDED_SEQUENCE",
    "ExpertOptions",
    "Need",
    "Preset",
    "TextExampleOptions",
    "compare",
    "make_optimizer",
    "parallelize",
    "parse",
    "print_once",
    "resolve",
    "run_main",
    "sharded_model",
    "stage_table",
    "start_run",
    "text_steps",
]

BY_HAND = {torch.float64: 1e-12, torch.float32: 1e-5}  # allowed differences


@dataclass(frozen=True, kw_only=True)
class TextExampleOptions(TensorParallelOptions, TextProgramOptions, ValidationOptions, BreakOptions):
    """Flags of an example that trains a Transformer on text: its sizes, and its run."""

    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    compile: Unused[bool] = False


def compare(run: Run, found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Log and record how far what an example has computed by hand is from what was expected. A collective.

    Raises:
        RuntimeError: by more than rounding.
    """
    pairs = [(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True)]
    apart = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    worst = max(max(row) for row in gather_floats(apart, run.device))
    run.log.info("by hand, output and gradients differ from one device's by %.1e", worst, stacklevel=2)
    run.describe(by_hand_difference=worst)
    if not worst <= (limit := BY_HAND[run.precision.storage]):
        raise RuntimeError(f"what is computed by hand differs from one device's by {worst:.1e}, more than {limit:.0e}")


def parallelize(run: Run, resolved: Resolved) -> Mesh:
    """Make the mesh, and on it the model with its initial weights, by the package; log it. A collective."""
    mesh = build_mesh(resolved.layout, run.device.type, run.options.timeout, experts=has_experts(resolved.model))
    apply(resolved.model, mesh, resolved.plan, run.precision, resolved.techniques)
    materialize(resolved.model, run.device, run.options.seed)
    run.log.info("%s\n%s", mesh, sharded_model(resolved.model), stacklevel=2)
    return mesh
