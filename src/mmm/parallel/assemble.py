"""Any model on any layout: the pieces of this folder put together, in one place.

::

    model on meta ──► stages (pp) ──► each: apply (tp, cp, checkpointing, compile, dp) ──► weights ──► ParallelModel
                        one, if pp is 1                                                             step(inputs, …)

An example that teaches one technique calls its pieces itself; what takes any layout starts here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError, LayoutError
from mmm.models.experts import has_experts
from mmm.models.weights import canonical_name
from mmm.parallel.apply import apply, check_compile, check_compiled_experts, check_weights, materialize
from mmm.parallel.clip import clip_grad_norm
from mmm.parallel.compiled import CompileReport
from mmm.parallel.context.apply import positions_of
from mmm.parallel.data.apply import check_data_parallel, sync_gradients
from mmm.parallel.expert.apply import BALANCE_RATE, balance_experts, imbalance
from mmm.parallel.loss import local_value
from mmm.parallel.memory.checkpointing import check_checkpointing
from mmm.parallel.memory.chunked_loss import Loss, loss_of
from mmm.parallel.memory.offload import check_offload
from mmm.parallel.memory.tiling import check_tiles
from mmm.parallel.mesh import Layout, has_axis
from mmm.parallel.pipeline.pipeline import SCHEDULES, Lap, Pipeline, ScheduleName, check_pipeline, stages_of
from mmm.parallel.pipeline.stages import Part, check_stages, cut, part_costs, parts_of, take_stage
from mmm.parallel.plan import Plan, check_axes, find, warn_unmatched
from mmm.parallel.ties import check_stage_ties
from mmm.runtime.device import Precision

Measure = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """What the sizes of a layout leave open.

    Attributes:
        data_parallel, cp_style, checkpointing, compile, loss_chunks, tile, offload: as `mmm.parallel.apply` takes them.
        schedule: of a pipeline. stages_per_rank: None for the fewest that the schedule takes.
        microbatches: parts that a batch goes through in. None: with pp what the schedule needs at least, else 1. With
            pp they are equal; else they differ by one sample at most (gradient accumulation).
    """

    data_parallel: str = "fsdp"
    cp_style: str = "ring"
    schedule: ScheduleName = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    loss_chunks: int = 1
    tile: int = 1
    offload: bool = False


@dataclass(frozen=True)
class Partition:
    """How a model is divided into pipeline stages; one stage where there is no pipeline.

    Attributes:
        parts: of the model, in the order of forward. costs: floating-point operations of each.
        stages: the numbers of the parts in each stage. microbatches: as settled.
    """

    parts: list[Part]
    costs: list[int]
    stages: list[range]
    microbatches: int

    def names(self) -> list[list[str]]:
        """The modules of each stage."""
        return [[name for number in held for name in self.parts[number]] for held in self.stages]

    def shares(self) -> list[float]:
        """Each stage's part of the work."""
        return [sum(self.costs[held.start : held.stop]) / sum(self.costs) for held in self.stages]


def partition_model(
    model: nn.Module, plan: Plan, layout: Layout, techniques: Techniques, inputs: Tensor, dtype: str = ""
) -> Partition:
    """Check how a model goes onto a layout, and divide it into stages; needs no process group.

    Args:
        model: its parameters on the meta device (`mmm.parallel.meta_parameters`). layout: fitted.
        inputs: of a step, of one data-parallel coordinate: (batch, …), on the meta device.
        dtype: the flag's, where there is one: what a pipeline cannot train with is refused.

    Raises:
        UserError: it does not go; with what to change.
    """
    check_weights(model)
    check_axes(plan, layout)
    check_data_parallel(techniques.data_parallel, layout)
    check_checkpointing(plan, techniques.checkpointing)
    check_tiles(techniques.tile, techniques.checkpointing)
    if techniques.compile:
        check_compiled_experts(model, plan, techniques.checkpointing)
    if techniques.tile > 1 and plan.tiled and not any(find(model, pattern) for pattern in plan.tiled):
        raise ConfigError(
            f"tile {techniques.tile}: the feed-forward layers of this model are experts, which have no tiles"
        )
    if techniques.offload:
        check_offload(techniques.data_parallel, dtype)
    if plan.check is not None:
        plan.check(model, layout, inputs, techniques.cp_style)
    batch = len(inputs)
    if layout.pp == 1:
        if techniques.stages_per_rank is not None:
            raise ConfigError(
                f"--stages_per_rank {techniques.stages_per_rank} without --pp: there is one stage, the model"
            )
        if techniques.compile:
            check_compile(plan, layout)
        microbatches = 1 if techniques.microbatches is None else techniques.microbatches
        if not 1 <= microbatches <= batch:
            raise LayoutError(
                f"--microbatches {microbatches}: a batch of {batch} a data-parallel coordinate can be "
                f"cut into 1 to {batch} parts"
            )
        return Partition([], [], [], microbatches)
    if techniques.schedule not in SCHEDULES:
        raise ConfigError(f"--schedule {techniques.schedule!r} is not one of {', '.join(SCHEDULES)}")
    least = SCHEDULES[techniques.schedule].microbatches(layout.pp)[0]
    microbatches = least if techniques.microbatches is None else techniques.microbatches
    parts = parts_of(model, plan)
    each = check_pipeline(
        layout,
        techniques.schedule,
        microbatches,
        batch,
        len(parts),
        techniques.stages_per_rank,
        dtype=dtype,
        compile=plan if techniques.compile else None,
        checkpointing=techniques.checkpointing,
    )
    costs = part_costs(model, parts, inputs)
    stages = cut(costs, layout.pp * each)
    partition = Partition(parts, costs, stages, microbatches)
    check_stage_ties(model, partition.names())
    check_stages(model, parts, stages, inputs)
    return partition


class ParallelModel:
    """This rank's part of a model on a mesh: what to call, step after step, whatever the layout.

    Attributes:
        modules: this rank's stages by number; number 0 alone is the whole model where there is no pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        layout: Layout,
        mesh: DeviceMesh,
        precision: Precision,
        techniques: Techniques,
        partition: Partition,
        *,
        device: torch.device,
        seed: int,
        loss: Loss | None = None,
        lap: Lap | None = None,
    ) -> None:
        """
        Args:
            model: parameters on the meta device; it is used up. mesh: of `build_mesh`. division: of `partition_model`.
            seed: of the initial weights.
            loss: (output, targets, count) → this rank's share, its sum over `count`. None: of `loss_of`.
            lap: `StepClock.lap`, of a clock with the parts dtf and dtb, and with pp also dtw.
        """
        self.layout, self.mesh, self.device, self._lap = layout, mesh, device, lap
        self.microbatches, self._positions = partition.microbatches, plan.sequence
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._experts = has_experts(model)
        self.at = dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
        self.modules: dict[int, nn.Module] = {}
        if layout.pp == 1:
            numbers = [0]
        else:
            warn_unmatched(plan, model)
            each = len(partition.stages) // layout.pp
            numbers = stages_of(self.at["pp"], layout.pp, techniques.schedule, each)
        for number in numbers:
            held = take_stage(model, partition.parts, partition.stages[number]) if partition.stages else model
            self.modules[number] = apply(
                held,
                mesh,
                plan,
                precision,
                data_parallel=techniques.data_parallel,
                cp_style=techniques.cp_style,
                checkpointing=techniques.checkpointing,
                compile=techniques.compile,
                loss_chunks=techniques.loss_chunks,
                tile=techniques.tile,
                offload=techniques.offload,
            )
            materialize(self.modules[number], device, seed)
        self._report = CompileReport(self.modules.values()) if techniques.compile else None
        self._loss = loss or loss_of(*self.modules.values())
        self._value: Measure = lambda output, targets: self._loss(output, targets, 1)  # of a pipeline's outputs
        self.pipeline: Pipeline | None = None
        if layout.pp > 1:
            self.pipeline = Pipeline(
                self.modules,
                len(partition.stages),
                mesh,
                schedule=techniques.schedule,
                microbatches=partition.microbatches,
                device=device,
                lap=lap,
                loss=lambda output, targets: self._value(output, targets),
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank, whole or in part, by the names in the whole model."""
        named = chain.from_iterable(module.named_parameters() for module in self.modules.values())
        return ((canonical_name(name), parameter) for name, parameter in named)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def clip(self, max_norm: float) -> Tensor:
        """Cut the norm of the whole gradient, over all stages and ranks, down to `max_norm`. A collective."""
        return clip_grad_norm(self.parameters(), max_norm, stages=self.mesh["pp"] if self.pipeline else None)

    def balance_experts(self, rate: float = BALANCE_RATE, measured: bool = True) -> float | None:
        """After a step of the optimizer: `mmm.parallel.expert.apply.balance_experts` on all stages. A collective.

        Args:
            measured: whether the imbalance is wanted, on all ranks or on none.

        Returns:
            `mmm.parallel.expert.apply.imbalance` over the layers of all stages, the same on every rank; None where
            it is not wanted, or the model has no experts.
        """
        if not self._experts:
            return None
        load = balance_experts(self.modules.values(), self.mesh, rate)
        if not measured:
            return None
        here = imbalance(load)
        if self.pipeline is None:
            return here
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        worst = torch.tensor(0.0 if math.isnan(here) else here, dtype=dtype, device=self.device)  # a stage without any
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh["pp"].get_group())
        return worst.item()

    def step(self, inputs: Tensor, targets: Tensor, count: int, scaler: GradScaler | None = None) -> Tensor:
        """Forward and backward of this data-parallel coordinate's samples, as micro-batches. A collective.

        Args:
            inputs, targets: (batch, …), whole sequences also under cp. count: targets in the global batch.
            scaler: scales up what is differentiated, for fp16; not with pp.

        Returns:
            This rank's share of the loss, scalar, without a graph: `Layout.loss_ranks` add up to the global loss.
        """
        share = self._step(inputs, targets, count, scaler)
        if self._report is not None:
            self._report.say()
            self._report = None
        return share

    def _step(self, inputs: Tensor, targets: Tensor, count: int, scaler: GradScaler | None) -> Tensor:
        inputs, targets, whole = self._own(inputs, targets)
        with loss_parallel():
            if self.pipeline is not None:
                assert scaler is None or not scaler.is_enabled(), "divide refuses fp16 with pp"
                self._value = lambda output, wanted: self._loss(output, wanted, count)
                return self.pipeline.step(inputs, targets, **whole)
            share, (model,) = 0.0, self.modules.values()
            parts = (inputs.tensor_split(self.microbatches), targets.tensor_split(self.microbatches))
            for number, (some, wanted) in enumerate(zip(*parts, strict=True), start=1):
                sync_gradients(model, number == self.microbatches)
                loss = self._loss(model(some, **whole), wanted, count)
                self._timed("dtf")
                (loss if scaler is None else scaler.scale(loss)).backward()
                self._timed("dtb")
                share += local_value(loss)
        return torch.tensor(share, dtype=torch.float64)

    def evaluate(self, inputs: Tensor, targets: Tensor, count: int) -> Tensor:
        """The share of the loss as `step` returns it, by forward alone. A collective."""
        return self.measure(inputs, targets, lambda output, wanted: self._loss(output, wanted, count))[0]

    @torch.no_grad()
    def measure(self, inputs: Tensor, targets: Tensor, *measures: Measure) -> Tensor:
        """Numbers worked out from outputs and targets, by forward alone. A collective.

        Args:
            inputs, targets: as for `step`. With pp the samples have to divide into the micro-batches of a step.
            measures: (output, targets) of a micro-batch → a scalar; those of the micro-batches are added up.

        Returns:
            (measures,) float64, of this data-parallel (and cp) coordinate, the same on all its stages.
        """
        inputs, targets, whole = self._own(inputs, targets)
        sums = torch.zeros(len(measures), dtype=torch.float64)

        def add(output: Tensor, wanted: Tensor) -> Tensor:
            sums.add_(torch.tensor([local_value(measure(output, wanted)) for measure in measures], dtype=sums.dtype))
            return sums.sum()

        with loss_parallel():
            if self.pipeline is None:
                (model,) = self.modules.values()
                add(model(inputs, **whole), targets)
                return sums
            self._value = add
            self.pipeline.evaluate(inputs, targets, **whole)
        shared = sums.to(self.device)  # only the last stage has outputs
        dist.all_reduce(shared, group=self.mesh["pp"].get_group())
        return shared

    def _own(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The tokens of this cp coordinate, and for models of sequences where those stand in the whole."""
        if not self._positions:
            return inputs, targets, {}
        cp = self.mesh["cp"].size() if has_axis(self.mesh, "cp") else 1
        positions = positions_of(self.at.get("cp", 0), cp, inputs.shape[1]).to(inputs.device)
        if cp > 1:
            inputs, targets = inputs[:, positions], targets[:, positions]
        return inputs, targets, {"positions": positions}

    def _timed(self, part: str) -> None:
        if self._lap is not None:
            self._lap(part)
