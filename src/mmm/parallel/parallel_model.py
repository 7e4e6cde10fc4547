"""Any model on any layout, behind one object.

::

    model on meta ──► stages (pp) ──► each: apply (tp, cp, checkpointing, compile, dp) ──► weights ──► ParallelModel
                        one, if pp is 1                                                              model(batch), …

An example that teaches one technique calls these functions itself; what takes any layout starts here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from mmm.layout import PADDING, Techniques
from mmm.nn.draw import accum_dtype, canonical_name
from mmm.nn.dropout import has_dropout
from mmm.nn.experts import has_experts
from mmm.nn.weights import InitRules
from mmm.parallel.clip import clip_grad_norm, local_norms
from mmm.parallel.cp.ring import positions_of
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.microbatches import microbatches_of
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.dp.zero import Zero
from mmm.parallel.ep.balance import BALANCE_RATE, balance_experts, imbalance
from mmm.parallel.initial_weights import materialize
from mmm.parallel.local import detached
from mmm.parallel.loss import Loss
from mmm.parallel.memory.chunked_loss import loss_of
from mmm.parallel.mesh import Mesh
from mmm.parallel.parallelize import apply
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Plan, warn_unmatched
from mmm.parallel.pp.pipeline import Lap, Pipeline
from mmm.parallel.pp.schedules import stages_of
from mmm.parallel.pp.stages import take_stage
from mmm.parallel.ties import StageTies, stage_ties
from mmm.runtime.device import Precision

Measure = Callable[[Tensor, Tensor], Tensor]


class ParallelModel:
    """This rank's part of a model on a mesh: what to call, step after step, whatever the layout.

    Attributes:
        modules: this rank's stages by number; number 0 alone is the full model where there is no pipeline.
        stages: of the pipeline, on all ranks; 0 without one.
        stage_to_pp_rank: the coordinate along pp that has each stage.
        tied_aliases: the further names of tied weights, and the first of each.
        has_dropout: whether the model has dropout, and takes ``sample_keys``.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh | DeviceMesh,
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
            model: parameters on the meta device; consumed: do not reuse it. partition: of `partition_model`.
            seed: of the initial weights.
            loss: (output, targets, count) → this rank's local loss, its sum divided by `count`. None: of `loss_of`.
            lap: `StepClock.lap`, of a clock with the parts dtf and dtb, and with pp also dtw.
        """
        self.mesh = mesh = Mesh.of(mesh)
        self.layout, self.techniques, self.device, self._lap = mesh.layout, techniques, device, lap
        self.microbatches = partition.microbatches
        self._has_sequences = plan.sequence
        self.coordinates = mesh.layout.coordinates(dist.get_rank())
        self._experts, self.has_dropout = has_experts(model), has_dropout(model)
        self._own_positions: dict[int, Tensor] = {}  # by the length of the sequence
        self.modules: dict[int, nn.Module] = {0: model}
        self.stages, self.stage_to_pp_rank = len(partition.stages), dict[int, int]()
        self._rules, rules, ties = InitRules(model), None, list[dict[int, str]]()
        if partition.stages:
            warn_unmatched(plan, model)
            pp, stages_per_rank = mesh.layout.pp, len(partition.stages) // mesh.layout.pp
            for pp_rank in range(pp):
                stage_ids = stages_of(pp_rank, pp, techniques.schedule, stages_per_rank)
                self.stage_to_pp_rank |= dict.fromkeys(stage_ids, pp_rank)
            stage_ids = [n for n, pp_rank in self.stage_to_pp_rank.items() if pp_rank == self.coordinates["pp"]]
            rules, ties = self._rules, stage_ties(model, partition.names())
            self.modules = {n: take_stage(model, partition.parts, partition.stages[n]) for n in stage_ids}
        for stage_id, stage in self.modules.items():
            self.modules[stage_id] = apply(stage, mesh, plan, precision, techniques)
            materialize(self.modules[stage_id], device, seed, rules, init="by_name")
        self.tied_aliases = self._rules.tied_aliases
        self.ties = StageTies(ties, self.modules, self.stage_to_pp_rank, mesh) if ties else None
        self._loss = loss or loss_of(*self.modules.values())
        self._measure: Measure = lambda output, targets: self._loss(output, targets, 1)  # of a pipeline's outputs
        self.pipeline: Pipeline | None = None
        if partition.stages:
            self.pipeline = Pipeline(
                self.modules,
                len(partition.stages),
                mesh,
                schedule=techniques.schedule,
                microbatches=partition.microbatches,
                device=device,
                lap=lap,
                loss=lambda output, targets: self._measure(output, targets),
            )

    @property
    def names(self) -> list[str]:
        """Of all parameters of the full model, in its order; of a tied weight the first."""
        return self._rules.names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank, full or sharded, by the names in the full model. A tied weight has
        its first name; a rank that has it in two stages has it twice (`StageTies`)."""
        named = chain.from_iterable(module.named_parameters() for module in self.modules.values())
        return ((self._rules.first_name(name), parameter) for name, parameter in named)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def saved_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank that a checkpoint has, such as experts' biases, by the names in the full model."""
        return saved_buffers(self.modules.values())

    def gather_updated(self) -> None:
        """What ZeRO-1 and ZeRO-2 do after a step, where something else has changed the shards. A collective."""
        for module in self.modules.values():
            if isinstance(module, Zero):
                module.gather()

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def gradient_norms(self) -> tuple[list[str], list[Tensor]]:
        """The parameters' names, and the norm of each gradient of this rank, or of its shard."""
        named = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        return [name for name, _ in named], local_norms([gradient for _, gradient in named])

    def clip(self, max_norm: float, norms: Sequence[Tensor] | None = None) -> Tensor:
        """Clip the norm of the full gradient, over all stages and ranks, to `max_norm`. A collective.

        Args:
            norms: as for `clip_grad_norm`.
        """
        if self.ties is not None:  # a weight that is in several stages counts once
            gradients = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
            again = {id(parameter) for parameter in self.ties.repeated}
            norms = local_norms([gradient for _, gradient in gradients]) if norms is None else norms
            norms = [norm * (id(p) not in again) for (p, _), norm in zip(gradients, norms, strict=True)]
        return clip_grad_norm(self.parameters(), max_norm, self.mesh["pp"] if self.pipeline else None, norms)

    def balance_experts(self, rate: float | Tensor = BALANCE_RATE, measured: bool = True) -> Tensor | None:
        """After a step of the optimizer: `mmm.parallel.balance_experts` on all stages. A collective.

        Args:
            measured: whether the imbalance is wanted, on all ranks or on none.

        Returns:
            `mmm.parallel.imbalance` over the layers of all stages, on the device, the same on every rank; None where
            it is not wanted, or the model has no experts.
        """
        if not self._experts:
            return None
        load = balance_experts(self.modules.values(), self.mesh, rate)
        if not measured:
            return None
        worst = imbalance(load).to(self.device)
        if self.pipeline is not None:
            worst = worst.nan_to_num(0.0)  # of a stage without experts
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh["pp"].get_group())
        return worst

    def __call__(self, batch: Any) -> Tensor:
        """The model's output for a micro-batch, of a model without a pipeline.

        Args:
            batch: a `mmm.data.Batch` of this data-parallel coordinate: full sequences also under cp.
        """
        (module,) = self.modules.values()
        inputs = self._own_tokens(batch.inputs)
        return module(inputs, **batch.arguments, **self._positions_of(batch.inputs))

    def loss(self, output: Tensor, batch: Any, count: int | Tensor) -> Tensor:
        """This rank's local loss of a micro-batch: the sum over its targets, divided by `count`.

        The losses of `Layout.loss_ranks`, of all micro-batches, add up to the global loss.

        Args:
            count: targets in the global batch. A batch that has none is refused once the row is read.
        """
        return self._loss(output, self._own_tokens(batch.targets), _divisor(count))

    def run_schedule(self, batch: Any, count: int | Tensor) -> Tensor:
        """Forward and backward of all micro-batches of a pipeline, in the order of its schedule. A collective.

        Returns:
            This rank's local loss, scalar, on the device and without a graph.
        """
        assert self.pipeline is not None
        divisor = _divisor(count)
        self._measure = lambda output, targets: self._loss(output, targets, divisor)
        inputs = self._own_tokens(batch.inputs)
        targets = self._own_tokens(batch.targets)
        loss = self.pipeline.step(inputs, targets, batch.arguments, **self._positions_of(batch.inputs))
        if self.ties is not None:
            self.ties.sum_gradients()
            if self._lap is not None:
                self._lap("dtb")
        return loss

    def count_targets(self, targets: Tensor) -> Tensor:
        """Targets of the global batch that are not `PADDING`: int64 scalar, on the device. A collective.

        Args:
            targets: of this data-parallel coordinate, full sequences also under cp.
        """
        count = (targets != PADDING).sum()
        for axis in ("dp_replicate", "dp_shard"):
            if self.layout.sizes[axis] > 1:
                dist.all_reduce(count, group=self.mesh[axis].get_group())
        return count

    def forward_backward(self, batch: Any, scaler: GradScaler | None = None) -> Tensor:
        """What a program writes out in its loop, for those that have none: the prover, and measurements. A collective.

        Args:
            batch: of a step; its `count` is the divisor.
            scaler: scales up what is differentiated, for fp16; not with pp.

        Returns:
            This rank's local loss, scalar, on the device and without a graph.
        """
        with loss_parallel():
            if self.pipeline is not None:
                assert scaler is None or not scaler.is_enabled(), "check_pipeline refuses fp16"
                return self.run_schedule(batch, batch.count)
            losses = []
            for microbatch in microbatches_of(batch, self.microbatches, self.modules.values()):
                loss = self.loss(self(microbatch), microbatch, batch.count)
                (loss if scaler is None else scaler.scale(loss)).backward()
                losses.append(detached(loss))
        return sum(losses[1:], losses[0])

    def evaluate(self, batch: Any, count: int | Tensor | None = None) -> Tensor:
        """This rank's local loss of a batch, by forward alone. A collective.

        Args:
            count: that the sum of losses is divided by. None: the batch's.
        """
        divisor = _divisor(batch.count if count is None else count)
        return self.measure(batch, lambda output, targets: self._loss(output, targets, divisor))[0]

    @torch.no_grad()
    def measure(self, batch: Any, *measures: Measure) -> Tensor:
        """Scalars of outputs and targets, by forward alone. A collective.

        Args:
            batch: as for a call. In a pipeline its samples have to divide into the micro-batches of a step.
            measures: (output, targets) of a micro-batch → a scalar; those of the micro-batches are added up.

        Returns:
            (measures,) `accum_dtype`, on the device, of this data-parallel (and cp) coordinate, the same on all its
            stages.
        """
        targets = self._own_tokens(batch.targets)
        sums = torch.zeros(len(measures), dtype=accum_dtype(self.device), device=self.device)

        def add(output: Tensor, targets: Tensor) -> Tensor:
            sums.add_(torch.stack([detached(measure(output, targets)) for measure in measures]))
            return sums.sum()

        with loss_parallel():
            if self.pipeline is None:
                (model,) = self.modules.values()
                add(self(batch), targets)
                reshard(model)  # FSDP itself does so only after a backward
                return sums
            self._measure = add
            inputs = self._own_tokens(batch.inputs)
            self.pipeline.evaluate(inputs, targets, batch.arguments, **self._positions_of(batch.inputs))
        dist.all_reduce(sums, group=self.mesh["pp"].get_group())  # only the last stage has outputs
        return sums

    def _own_tokens(self, tokens: Tensor) -> Tensor:
        """Those of this rank's cp coordinate.

        Args:
            tokens: (batch, seq).
        """
        if self.layout.cp == 1 or not self._has_sequences:
            return tokens
        return tokens[:, self._positions(tokens)]

    def _positions_of(self, inputs: Tensor) -> dict[str, Tensor]:
        """For a model of sequences, the positions of this rank's tokens in the full sequence."""
        return {"positions": self._positions(inputs)} if self._has_sequences else {}

    def _positions(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length not in self._own_positions:
            own = positions_of(self.coordinates["cp"], self.layout.cp, length)
            self._own_positions[length] = own.to(tokens.device)
        return self._own_positions[length]


def _divisor(count: int | Tensor) -> int | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def saved_buffers(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The buffers of modules that a checkpoint has, by canonical name."""
    buffers: dict[str, Tensor] = {}
    for inner in map(unwrapped, modules):
        saved = inner.state_dict().keys()
        buffers |= {canonical_name(name): buffer for name, buffer in inner.named_buffers() if name in saved}
    return buffers
