"""What the stages of a pipeline send each other, found without the other stages: their shapes.

On the real ranks PyTorch infers them in the first step: each stage runs a micro-batch and sends the shapes of its
outputs to the next. In a dry run there is one rank; so the stages before its own are built here, with tensor
parallelism alone, which is what shapes depend on, and run on tensors without elements. Stages with the same parts of
the same sizes, and the same inputs, have the same outputs: a deep model has few different ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmm.layout import UNSHARDED, Layout
from mmm.nn import draw
from mmm.nn.experts import has_experts
from mmm.parallel.cp.ring import positions_of
from mmm.parallel.mesh import build_mesh
from mmm.parallel.pp.p2p import to_contiguous
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.stages import take_stage
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.torch_private import pipelining
from mmm.torch_private.fake import unset_fake_temporarily
from mmm_lab.planner.tracker import MemoryTracker


@dataclass
class StageShapes:
    """The outputs of each stage for a micro-batch.

    Args:
        resolved: a `mmm.trainer.job.Job` with a pipeline.
        batch: of the step that is under way, on this rank; None: no `Pipeline` runs it.
    """

    resolved: Any
    layout: Layout
    device: torch.device
    precision: Any
    memory: MemoryTracker
    batch: Tensor | None = None
    _mesh: Any = None
    _outputs: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def outputs(self, number: int) -> tuple[Tensor, ...]:
        """Of stage `number`, on tensors without elements."""
        with self.memory.paused(), torch.no_grad():
            given: tuple[Tensor, ...] = (self._inputs(),)
            for each in range(number + 1):
                given = self._forward(each, given)
        return given

    def _inputs(self) -> Tensor:
        """Of the first stage: a micro-batch."""
        sample, cp = self.resolved.sample, self.layout.cp
        own = sample if cp == 1 else sample[:, : sample.shape[1] // cp]  # this rank's part of each sequence
        batch = own if self.batch is None else self.batch
        microbatches = self.resolved.partition.microbatches
        return torch.empty_like(batch[: len(batch) // microbatches], device=self.device)

    def _forward(self, number: int, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        resolved, layout = self.resolved, self.layout
        partition, plan = resolved.partition, resolved.plan
        # FSDP casts a stage and what comes into it; zero1 and zero2 leave both wide, for autocast to cast.
        autocast = resolved.techniques.data_parallel in UNSHARDED and self.precision.mixed
        with unset_fake_temporarily():
            stage = take_stage(resolved.model, partition.parts, partition.stages[number])
        key = (_described(stage), tuple((tuple(x.shape), x.dtype) for x in given))
        if key not in self._outputs:
            with unset_fake_temporarily():
                draw.convert(stage, self.precision.storage if autocast else self.precision.compute)
                if layout.tp > 1:
                    if self._mesh is None:
                        self._mesh = build_mesh(layout, self.device.type, experts=has_experts(stage))
                    apply_tensor_parallel(stage, self._mesh["tp"], plan)
            stage.to_empty(device=self.device)
            named = {}
            if plan.sequence:
                named["positions"] = positions_of(0, layout.cp, resolved.sample.shape[1]).to(self.device)
            if not autocast:
                given = tuple(x.to(self.precision.compute) if x.is_floating_point() else x for x in given)
            with torch.autocast(self.device.type, self.precision.compute, enabled=autocast):
                output = stage(*given, **named)
            outputs = output if isinstance(output, tuple) else (output,)
            self._outputs[key] = tuple(to_contiguous(x) for x in outputs)
        return self._outputs[key]


def _described(stage: nn.Module) -> tuple[Any, ...]:
    """What a stage computes with, but for the names of its layers."""
    leaves = (module for module in stage.modules() if not any(True for _ in module.children()))
    return tuple(
        (type(module).__name__, *((tuple(p.shape)) for p in module.parameters(recurse=False))) for module in leaves
    )


@contextmanager
def known_shapes(shapes: StageShapes) -> Iterator[None]:
    """Inside, the stages of PyTorch's pipelines ask `shapes` instead of each other."""

    def received(self: Any, source: int) -> Any:
        if source < self.stage_index:
            with shapes.memory.paused():
                outputs = tuple(
                    output.detach().requires_grad_(output.is_floating_point()) for output in shapes.outputs(source)
                )
            return pipelining.forward_meta(outputs)
        return pipelining.backward_meta(self)

    run = Pipeline._run

    def noted(self: Pipeline, call: Any, inputs: Tensor, *given: Any) -> Tensor:
        shapes.batch = inputs
        return run(self, call, inputs, *given)

    try:
        Pipeline._run = noted  # type: ignore[method-assign, assignment]
        with pipelining.known_shapes(received, _Zero()):
            yield
    finally:
        Pipeline._run = run  # type: ignore[method-assign]


class _Zero:
    """The vote of a pipeline whose stages infer their shapes."""

    def item(self) -> int:
        return 0
