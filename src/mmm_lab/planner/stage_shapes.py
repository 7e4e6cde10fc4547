"""Finds the shapes of what pipeline stages send each other, in a dry run, where the other stages are missing.

On real ranks PyTorch infers the shapes in the first step: each stage runs a micro-batch and sends the shapes of its
outputs to the next stage. A dry run has one rank. So the stages before its own are built here and run on tensors
without elements, with tensor parallelism only, because shapes depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmm.layout import UNSHARDED, Layout
from mmm.nn import init
from mmm.nn.experts import has_experts
from mmm.parallel.cp.ring import positions_of
from mmm.parallel.mesh import build_mesh
from mmm.parallel.pp.p2p import to_contiguous
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.stages import take_stage
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.torch_private import pipelining
from mmm.torch_private.fake import unset_fake_temporarily
from mmm.torch_private.replace import replaced
from mmm_lab.planner.tracker import MemoryTracker


@dataclass
class StageShapes:
    """The outputs of each stage for one micro-batch.

    Args:
        job: a `mmm.trainer.job.Job` with a pipeline.
        batch: this rank's batch in the current step; None if no `Pipeline` runs it.
    """

    job: Any
    layout: Layout
    device: torch.device
    precision: Any
    memory: MemoryTracker
    batch: Tensor | None = None
    _mesh: Any = None
    _outputs: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def outputs(self, stage: int) -> tuple[Tensor, ...]:
        """The outputs of a stage, as tensors without elements."""
        with self.memory.paused(), torch.no_grad():
            tensors: tuple[Tensor, ...] = (self._inputs(),)
            for index in range(stage + 1):
                tensors = self._forward(index, tensors)
        return tensors

    def _inputs(self) -> Tensor:
        """The input of the first stage: a micro-batch."""
        batch = self.batch
        if batch is None:
            # (batch, seq): over cp this rank has a part of each sequence.
            batch = self.job.sample
            if self.layout.cp > 1:
                batch = batch[:, : batch.shape[1] // self.layout.cp]
        microbatches = self.job.partition.microbatches
        return torch.empty_like(batch[: len(batch) // microbatches], device=self.device)

    def _forward(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the stage with this index, unless it has run on inputs of these shapes."""
        job = self.job
        layout = self.layout
        partition = job.partition
        plan = job.plan
        # FSDP casts a stage and its inputs. zero1 and zero2 leave both wide, and autocast casts them.
        autocast = job.techniques.data_parallel in UNSHARDED and self.precision.mixed
        key = (index, *[tuple(x.shape) for x in inputs])
        if key not in self._outputs:
            with unset_fake_temporarily():
                stage = take_stage(job.model, partition.parts, partition.stages[index])
                init.convert(stage, self.precision.storage if autocast else self.precision.compute)
                if layout.tp > 1:
                    if self._mesh is None:
                        # Made once. It needs elements, hence outside of fake mode.
                        self._mesh = build_mesh(layout, self.device.type, experts=has_experts(stage))
                    apply_tensor_parallel(stage, self._mesh["tp"], plan)
            # The stage has no elements: only shapes and dtypes are computed.
            stage.to_empty(device=self.device)
            options = {}
            if plan.sequence:
                options["positions"] = positions_of(0, layout.cp, job.sample.shape[1]).to(self.device)
            if not autocast:
                # Tokens are integers, and stay so.
                inputs = tuple(x.to(self.precision.compute) if x.is_floating_point() else x for x in inputs)
            with torch.autocast(self.device.type, self.precision.compute, enabled=autocast):
                output = stage(*inputs, **options)
            outputs = output if isinstance(output, tuple) else (output,)
            self._outputs[key] = tuple(to_contiguous(x) for x in outputs)
        return self._outputs[key]


@contextmanager
def known_shapes(shapes: StageShapes) -> Iterator[None]:
    """Inside, the stages of PyTorch's pipelines ask `shapes` instead of each other."""

    def received(self: Any, source: int) -> Any:
        # In forward a stage hears from the one before it.
        if source < self.stage_index:
            with shapes.memory.paused():
                outputs = [
                    output.detach().requires_grad_(output.is_floating_point()) for output in shapes.outputs(source)
                ]
            return pipelining.forward_meta(tuple(outputs))
        return pipelining.backward_meta(self)

    run = Pipeline._run

    def noted(self: Pipeline, call: Any, inputs: Tensor, *args: Any) -> Tensor:
        shapes.batch = inputs
        return run(self, call, inputs, *args)

    with replaced(Pipeline, _run=noted), pipelining.known_shapes(received, _Zero()):
        yield


class _Zero:
    """The result of the stages' vote on whether they infer shapes: they do."""

    def item(self) -> int:
        return 0
