"""Any model on any layout, behind one object.

::

    model on meta ──► stages (pp) ──► parallelize (tp, cp, checkpointing, compile, dp) ──► weights ──► ParallelModel
                        each, one if pp is 1                                                   model(batch), …

An example that teaches one technique calls these functions itself. A program that takes any layout starts here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from mmm.layout import PADDING, Techniques
from mmm.nn.dropout import has_dropout
from mmm.nn.experts import has_experts
from mmm.nn.init import accum_dtype, canonical_name
from mmm.nn.weights import InitRules
from mmm.parallel.clip import clip_grad_norm, local_norms, scale_gradients
from mmm.parallel.cp.ring import positions_of
from mmm.parallel.cp.space.checks import check_field
from mmm.parallel.cp.space.strips import own_rows
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.cp.styles import splits_space
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.microbatches import microbatches_of
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.dp.zero import Zero
from mmm.parallel.ep.balance import BALANCE_RATE, balance_experts, imbalance
from mmm.parallel.exact.gradients import exact_microbatches, rows_as_visited
from mmm.parallel.exact.norm import exact_norm
from mmm.parallel.exact.trees import add_up
from mmm.parallel.initial_weights import materialize
from mmm.parallel.local import detached
from mmm.parallel.loss import Loss
from mmm.parallel.memory.chunked_loss import loss_of
from mmm.parallel.mesh import Mesh
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Field, Plan, warn_unmatched
from mmm.parallel.pp.pipeline import Lap, Pipeline
from mmm.parallel.pp.schedules import stages_of
from mmm.parallel.pp.stages import take_stage
from mmm.parallel.pp.ties import StageTie, StageTies, stage_ties
from mmm.parallel.techniques import parallelize
from mmm.runtime.device import Precision
from mmm.torch_private.operators import tree_map_only

Measure = Callable[[Tensor, Tensor], Tensor]


class ParallelModel:
    """This rank's part of a model on a mesh: what a program calls, step after step, whatever the layout.

    Attributes:
        mesh: the mesh that the model lies on.
        layout: the sizes of its axes.
        coordinates: this rank's place on each axis.
        modules: this rank's stages, by number. Without a pipeline the only one, number 0, is the full model.
        stages: number of stages of the pipeline, over all ranks; 0 without one.
        stage_to_pp_rank: maps each stage to the pp coordinate that has it.
        microbatch_count: number of micro-batches of a step.
        ties: keeps weights equal that several stages have; None where there are none.
        pipeline: the schedule of the stages; None without a pipeline.
        tied_aliases: maps each further name of a tied weight to its first name.
        has_attention: whether the plan names modules of attention, in which the tokens of a sequence interact.
        has_dropout: whether the model has dropout, and so takes ``sample_keys``.
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
        """Split the model into stages, parallelize those of this rank, and draw their weights. A collective.

        Args:
            model: the full model, its parameters on the meta device. It is consumed: do not use it afterwards.
            partition: how the model is split, from `partition_model`.
            seed: of the initial weights.
            loss: function of (output, targets, count) that returns this rank's local loss: its sum divided by `count`.
                None: the loss from `loss_of`.
            lap: `StepClock.model_lap` of a clock with the parts dtf and dtb, and with pp also dtw.
        """
        mesh = Mesh.of(mesh)
        self.mesh = mesh
        self.layout = mesh.layout
        self.techniques = techniques
        self.device = device
        self._lap = lap
        self.microbatch_count = partition.microbatches
        self._has_sequences = plan.sequence
        # The fields that cp splits, if it does.
        self._field: Field | None = None
        # How many ranks compute the same outputs.
        self._copies = 1
        if splits_space(mesh.layout, techniques):
            assert plan.space is not None
            self._field = plan.space
            if plan.space.targets is None:
                self._copies = mesh.layout.cp
            if partition.stages:
                # Stages are parts of the model, which does not run without the others.
                read_fields(model, plan.space, mesh.layout.cp)
        self.coordinates = mesh.layout.coordinates(dist.get_rank())
        self._has_experts = has_experts(model)
        self.has_attention = bool(plan.attention)
        self.has_dropout = has_dropout(model)
        # By the length of the sequence, which an evaluation may change.
        self._positions_by_length: dict[int, Tensor] = {}
        self.modules: dict[int, nn.Module] = {0: model}
        self.stages = len(partition.stages)
        self.stage_to_pp_rank: dict[int, int] = {}
        # Rules and ties are read from the full model, before it is taken apart.
        self._rules = InitRules(model)
        # Without a pipeline a model draws its weights by its own rules.
        stage_rules = None
        ties: list[StageTie] = []
        if partition.stages:
            warn_unmatched(plan, model)
            stage_rules = self._rules
            ties = stage_ties(model, partition.names())
            pp = mesh.layout.pp
            stages_per_rank = self.stages // pp
            for pp_rank in range(pp):
                for stage_id in stages_of(pp_rank, pp, techniques.schedule, stages_per_rank):
                    self.stage_to_pp_rank[stage_id] = pp_rank
            self.modules = {}
            for stage_id, pp_rank in self.stage_to_pp_rank.items():
                if pp_rank == self.coordinates["pp"]:
                    # The names of the modules in it, in the order of forward.
                    stage_parts = partition.stages[stage_id]
                    self.modules[stage_id] = take_stage(model, partition.parts, stage_parts)
        for stage_id, stage in self.modules.items():
            module = parallelize(stage, mesh, plan, precision, techniques)
            materialize(module, device, seed, stage_rules, init="by_name")
            self.modules[stage_id] = module
        self.tied_aliases = self._rules.tied_aliases
        self.ties: StageTies | None = None
        if ties:
            self.ties = StageTies(ties, self.modules, self.stage_to_pp_rank, mesh)
        if loss is None:
            loss = loss_of(*self.modules.values())
        self._loss = loss
        # What a pipeline's last stage computes from outputs and targets: a step sets the loss, an evaluation its sums.
        self._measure: Measure = lambda output, targets: self._loss(output, targets, 1)
        self.pipeline: Pipeline | None = None
        if partition.stages:
            self.pipeline = Pipeline(
                self.modules,
                self.stages,
                mesh,
                schedule=techniques.schedule,
                microbatches=partition.microbatches,
                device=device,
                lap=lap,
                exact=techniques.exact is not None,
                loss=lambda output, targets: self._measure(output, targets),
            )

    @property
    def names(self) -> list[str]:
        """The names of all parameters of the full model, in its order; a tied weight has its first name."""
        return self._rules.names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank, full or sharded, by the names in the full model. A tied weight has
        its first name; a rank that has it in two stages yields it twice (`StageTies`)."""
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                yield self._rules.first_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def saved_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank that a checkpoint has, such as experts' biases, by the names in the full model."""
        return saved_buffers(self.modules.values())

    def gather_updated(self) -> None:
        """Gather the parameters of ZeRO-1 and ZeRO-2 again, after something else than an optimizer's step has changed
        the shards. A collective of the data-parallel ranks."""
        for module in self.modules.values():
            if isinstance(module, Zero):
                module.gather()

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of a step's batch. A pipeline's schedule makes them itself.

        The gradients are summed over dp in the backward of the last one. When the loop asks for the next one, the time
        so far counts as backward (``dtb``).
        """
        modules = self.modules.values()
        if self.techniques.exact is not None:
            microbatches = exact_microbatches(batch, self.microbatch_count, modules)
        else:
            microbatches = microbatches_of(batch, self.microbatch_count, modules)
        for microbatch in microbatches:
            yield microbatch
            if self._lap is not None:
                self._lap("dtb")

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def gradient_norms(self) -> tuple[list[str], list[Tensor]]:
        """Return the names of the parameters with a gradient, and the norm of each on this rank, or of its shard."""
        names = []
        gradients = []
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                names.append(name)
                gradients.append(parameter.grad)
        return names, local_norms(gradients)

    def clip(self, max_norm: float, norms: Sequence[Tensor] | None = None) -> Tensor:
        """Clip the norm of the full gradient, over all stages and ranks, to `max_norm`. A collective of all ranks.

        Args:
            norms: `local_norms` of the gradients, where they are known already.

        Returns:
            The norm before clipping, as `clip_grad_norm` does.
        """
        stages = None
        if self.pipeline is not None:
            # Each stage has other layers, so squares are summed over pp as well.
            stages = self.mesh["pp"]
        if self.techniques.exact is not None:
            gradients = {}
            for name, parameter in self.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
            norm = exact_norm(gradients, self.names, self.device, stages)
            scale_gradients(list(gradients.values()), max_norm, norm)
            return norm
        if self.ties is not None:
            parameters = []
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameters.append(parameter)
            if norms is None:
                _, norms = self.gradient_norms()
            # A weight that is in several stages counts once: its copies in later stages have norm 0 here.
            repeated = {id(parameter) for parameter in self.ties.repeated}
            once = []
            for parameter, norm in zip(parameters, norms, strict=True):
                is_first = id(parameter) not in repeated
                once.append(norm * is_first)
            norms = once
        return clip_grad_norm(self.parameters(), max_norm, stages, norms)

    def balance_experts(self, rate: float | Tensor = BALANCE_RATE, measured: bool = True) -> Tensor | None:
        """Balance the experts of all stages after a step of the optimizer (`mmm.parallel.balance_experts`).

        A collective of all ranks.

        Args:
            rate: step of the experts' biases.
            measured: whether the imbalance is wanted; the same on all ranks.

        Returns:
            `mmm.parallel.imbalance` over the layers of all stages, on the device, the same on every rank. None where
            it is not wanted, or the model has no experts.
        """
        if not self._has_experts:
            return None
        load = balance_experts(self.modules.values(), self.mesh, rate)
        if not measured:
            return None
        worst = imbalance(load).to(self.device)
        if self.pipeline is not None:
            # A stage without experts has NaN, and must not win the maximum.
            worst = worst.nan_to_num(0.0)
            # The worst layer of all stages: over pp, because each of its ranks has other layers.
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh["pp"].get_group())
        return worst

    def __call__(self, batch: Any) -> Tensor:
        """Return the output for a micro-batch, of a model without a pipeline.

        Args:
            batch: a `mmm.data.Batch` of this data-parallel coordinate, with full sequences under cp too.
        """
        (module,) = self.modules.values()
        # (batch, seq / cp)
        inputs = self._own_inputs(batch.inputs)
        positions = self._positions_of(batch.inputs)
        return module(inputs, **batch.arguments, **positions)

    def loss(self, output: Tensor, batch: Any, count: int | Tensor) -> Tensor:
        """Return this rank's local loss of a micro-batch: the sum over its targets, divided by `count`.

        The losses of all micro-batches, on the ranks in `Layout.loss_ranks`, add up to the global loss.

        Args:
            count: number of targets in the global batch. A batch without targets is refused once the row is read.
        """
        # (batch, seq / cp)
        targets = self._own_targets(batch.targets)
        return self._loss(output, targets, count * self._copies)

    def run_schedule(self, batch: Any, count: int | Tensor) -> Tensor:
        """Run forward and backward of all micro-batches through the pipeline, in the order of its schedule.

        A collective: the ranks of pp send each other activations and gradients.

        Returns:
            This rank's local loss, a scalar on the device without a graph.
        """
        assert self.pipeline is not None
        self._measure = lambda output, targets: self._loss(output, targets, count * self._copies)
        inputs = self._own_inputs(batch.inputs)
        targets = self._own_targets(batch.targets)
        positions = self._positions_of(batch.inputs)
        arguments = batch.arguments
        if self.techniques.exact is not None:
            # The schedule runs the micro-batches from the first to the last.
            order = rows_as_visited(len(inputs), self.microbatch_count)
            rows = order.to(inputs.device)
            inputs = inputs[rows]
            targets = targets[rows]
            arguments = tree_map_only(Tensor, lambda tensor: tensor[rows], arguments)
        loss = self.pipeline.step(inputs, targets, arguments, **positions)
        if self.ties is not None:
            # The stages that have a tied weight each have a gradient of it: the sum makes them equal again.
            self.ties.sum_gradients()
            if self._lap is not None:
                self._lap("dtb")
        return loss

    def count_targets(self, targets: Tensor) -> Tensor:
        """Count the targets of the global batch that are not `PADDING`. A collective of the data-parallel ranks.

        Args:
            targets: those of this data-parallel coordinate, with full sequences under cp too.

        Returns:
            int64 scalar, on the device.
        """
        count = (targets != PADDING).sum()
        # Only over dp: the ranks of cp, tp and pp have the targets of the same samples.
        for axis in ("dp_replicate", "dp_shard"):
            if self.layout.sizes[axis] > 1:
                dist.all_reduce(count, group=self.mesh[axis].get_group())
        return count

    def forward_backward(self, batch: Any, scaler: GradScaler | None = None) -> Tensor:
        """Run forward and backward of a step. A collective.

        Programs write this out in their loop. It is for what has no loop: the prover, and measurements.

        Args:
            batch: the batch of a step. Its `count` divides the loss.
            scaler: scales up the loss before backward, for fp16; not with pp.

        Returns:
            This rank's local loss, a scalar on the device without a graph.
        """
        with loss_parallel():
            if self.pipeline is not None:
                assert scaler is None or not scaler.is_enabled(), "check_pipeline refuses fp16"
                return self.run_schedule(batch, batch.count)
            losses = []
            for microbatch in self.microbatches(batch):
                # No name for the output: logits are freed before backward, unless it needs them.
                loss = self.loss(self(microbatch), microbatch, batch.count)
                scaled_loss = loss
                if scaler is not None:
                    # Small gradients would be zero in fp16.
                    scaled_loss = scaler.scale(loss)
                scaled_loss.backward()
                losses.append(detached(loss))
        return add_up(losses, exact=self.techniques.exact is not None)

    def evaluate(self, batch: Any, count: int | Tensor | None = None) -> Tensor:
        """Return this rank's local loss of a batch, by forward only. A collective.

        Args:
            count: what the sum of losses is divided by. None: the batch's number of targets.
        """
        divisor = batch.count if count is None else count
        (loss,) = self.measure(batch, lambda output, targets: self._loss(output, targets, divisor))
        return loss

    @torch.no_grad()
    def measure(self, batch: Any, *measures: Measure) -> Tensor:
        """Compute scalars from outputs and targets, by forward only. A collective.

        Args:
            batch: as for a call. In a pipeline its samples have to divide into the micro-batches of a step.
            measures: functions of (output, targets) of a micro-batch that return a scalar. Those of all micro-batches
                are added up.

        Returns:
            (measures,) `accum_dtype`, on the device: the sums of this data-parallel (and cp) coordinate, the same on
            all of its stages.
        """
        targets = self._own_targets(batch.targets)
        sums = torch.zeros(len(measures), dtype=accum_dtype(self.device), device=self.device)

        def add(output: Tensor, targets: Tensor) -> Tensor:
            values = []
            for measure in measures:
                value = measure(output, targets) / self._copies
                values.append(detached(value))
            sums.add_(torch.stack(values))
            # A schedule wants a loss of each micro-batch; this one is not read.
            return sums.sum()

        with loss_parallel():
            if self.pipeline is None:
                (model,) = self.modules.values()
                add(self(batch), targets)
                # FSDP itself frees the gathered parameters of its root only after a backward.
                reshard(model)
                return sums
            self._measure = add
            inputs = self._own_inputs(batch.inputs)
            positions = self._positions_of(batch.inputs)
            self.pipeline.evaluate(inputs, targets, batch.arguments, **positions)
        # Only the last stage has outputs; the others add their zeros.
        dist.all_reduce(sums, group=self.mesh["pp"].get_group())
        return sums

    def _own_inputs(self, inputs: Tensor) -> Tensor:
        """Return the tokens, or the rows, of this rank's cp coordinate.

        Args:
            inputs: (batch, seq), the full sequences, or full fields.
        """
        if self._field is None:
            return self._own_tokens(inputs)
        check_field(self._field, tuple(inputs.shape[1:]))
        return self._own_rows(inputs, self._field.dim)

    def _own_targets(self, targets: Tensor) -> Tensor:
        """As `_own_inputs`, of targets. What is not split is the same on all ranks."""
        if self._field is None:
            return self._own_tokens(targets)
        if self._field.targets is None:
            return targets
        return self._own_rows(targets, self._field.targets)

    def _own_rows(self, field: Tensor, dim: int) -> Tensor:
        return own_rows(field, self.layout.cp, self.coordinates["cp"], dim)

    def _own_tokens(self, tokens: Tensor) -> Tensor:
        """Return the tokens of this rank's cp coordinate.

        Args:
            tokens: (batch, seq), the full sequences.

        Returns:
            (batch, seq / cp).
        """
        if self.layout.cp == 1 or not self._has_sequences:
            return tokens
        return tokens[:, self._positions(tokens)]

    def _positions_of(self, inputs: Tensor) -> dict[str, Tensor]:
        """The argument ``positions`` for a model of sequences: places of this rank's tokens in the full sequence."""
        if not self._has_sequences:
            return {}
        return {"positions": self._positions(inputs)}

    def _positions(self, tokens: Tensor) -> Tensor:
        """(seq / cp,) int64: the places of this rank's tokens in sequences such as `tokens`, (batch, seq)."""
        length = tokens.shape[1]
        if length not in self._positions_by_length:
            positions = positions_of(self.coordinates["cp"], self.layout.cp, length)
            self._positions_by_length[length] = positions.to(tokens.device)
        return self._positions_by_length[length]


def saved_buffers(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The buffers of modules that a checkpoint has, by canonical name."""
    buffers: dict[str, Tensor] = {}
    for module in modules:
        inner = unwrapped(module)
        # Non-persistent buffers are in `named_buffers` and not in a state dict.
        saved = inner.state_dict().keys()
        for name, buffer in inner.named_buffers():
            if name in saved:
                buffers[canonical_name(name)] = buffer
    return buffers
