"""What one rank holds in memory at the peak of a step, part by part, from the model's sizes only.

The peak is the moment of a step with the largest sum. Four moments are compared::

    loss        all activations, the logits and their gradients
    backward    activations of all layers, what the backward pass of the last layer needs, gradients of the head
    first       activations of one layer, what its backward pass needs, gradients of all layers
    end         no activations, all gradients, those of the embedding on their way to the other ranks

With FSDP a rank holds one gathered unit, the next unit on its way, and the gradients of one unit being reduced. With
several micro-batches, and in a pipeline, it keeps the unsharded gradients of all its layers until the last micro-batch.
A pipeline also keeps its stage gathered, and the activations of all micro-batches under way.

This is what this package's trainers do on PyTorch 2.13, in any step after the first. Not counted: fragmentation of the
allocator and the communication library (`Machine.memory_reserve`), and what a kernel uses internally.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from mmm.layout import Layout, Techniques
from mmm.models.costs import KeptActivations, Setting
from mmm.optim.adamw import STATE
from mmm.parallel.dp.data_parallel import needs_no_fsdp
from mmm.parallel.dp.fsdp import RESHARD_AFTER_FORWARD
from mmm_lab.planner.spec import ModelSpec, Sizes
from mmm_lab.planner.trial import PlannedStage, Trial

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits")
MOMENTS = ("the loss", "backward of the last layer", "backward of the first", "the end of backward")
# By name of a precision: bytes of an element of the stored weights, and of an element in compute.
WIDTHS = {"bf16": (4, 2), "fp16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}


class Backward(NamedTuple):
    """Bytes that one micro-batch keeps for its backward pass.

    Attributes:
        layers: activations of all layers of the stage together.
        head: activations of the head; 0 without one.
        working: what the backward pass of one layer needs on top of these.
        layer: activations of a single layer.
    """

    layers: float
    head: float
    working: float
    layer: float


class Moment(NamedTuple):
    """Bytes that depend on the moment of a step and on how data parallelism shards the model.

    Attributes:
        gradients: gradients that the rank keeps, sharded or not.
        gathered: parameters that FSDP has gathered, or copies that autocast has made.
        buffers: gradients that are being reduced over the data-parallel ranks. At the loss, gradients that a loss in
            chunks sums up are added to them.
    """

    gradients: float
    gathered: float
    buffers: float


def in_flight(
    schedule: str,
    pp: int,
    coordinate: int,
    microbatches: int,
    n_stages: int,
) -> float:
    """The most micro-batches that a pipeline rank holds activations of at one time.

    A micro-batch counts in full when it has passed all stages of the rank. For schedules that split the backward pass
    this is an upper bound: a micro-batch counts in full until the gradients of its weights are computed, and yet its
    gradients of inputs have freed some of its activations by then.

    Args:
        coordinate: the rank's coordinate on pp.
        n_stages: number of stages on each rank.
    """
    if schedule in ("GPipe", "LoopedBFS"):
        return microbatches
    if schedule == "1F1B":
        return min(microbatches, pp - coordinate)
    forwards = microbatches * n_stages
    # Forwards through one stage that the rank runs before its first backward: the warm-up of PyTorch's
    # Interleaved1F1B, and 1 for the first forward after it.
    interleaved = (n_stages - 1) * pp + 2 * (pp - coordinate - 1) + 1
    if schedule == "Interleaved1F1B":
        return min(forwards, interleaved) / n_stages
    if schedule == "InterleavedZeroBubble":
        return min(forwards, interleaved + pp) / n_stages
    # ZBVZeroBubble and DualPipeV: every rank runs at most 2 * pp forwards through one stage before their backwards.
    # DualPipeV starts one more forward together with the first backward.
    return min(forwards, 2 * pp + 1) / n_stages


class MemoryModel:
    """Predicts the memory of a model's ranks.

    Args:
        device: cuda, xpu or cpu; their kernels keep different tensors.
        dtype: name of a precision.
        optimizer: a key of `STATE`.
    """

    def __init__(self, spec: ModelSpec, device: str, dtype: str, optimizer: str = "adamw") -> None:
        self.spec = spec
        self.device = device
        self.storage, self.compute = WIDTHS[dtype]
        self.state = STATE[optimizer]
        # A search calls these many times with the same few arguments. Each model has its own caches.
        self.sizes = cache(self._sizes)
        self.kept = cache(self._kept)
        self.totals = cache(self._totals)
        self.activations = cache(self._activations)

    def _sizes(
        self,
        kind: int,
        tp: int,
        ep: int,
        shards: int,
        expert_shards: int,
    ) -> Sizes:
        """Elements of one part of the model on a rank.

        Args:
            kind: index of the part's kind in the spec.
            shards: number of ranks that shard a dense parameter.
            expert_shards: number of ranks that shard a parameter of experts.
        """
        local = 0
        padded = 0
        sharded = 0
        for matrix in self.spec.kinds[kind].matrices:
            shape = matrix.local(tp, ep)
            rows = shape[0]
            columns = math.prod(shape[1:])
            n_shards = shards
            if matrix.expert:
                n_shards = expert_shards
                # (experts, rows, columns): where the ranks cannot share out the experts evenly,
                # `mmm.parallel.ep.expert_parallel` shards the rows of each expert instead.
                if rows % n_shards and shape[1] % n_shards == 0:
                    rows *= shape[1]
                    columns = math.prod(shape[2:])
            rows_per_rank = -(-rows // n_shards)
            local += math.prod(shape)
            sharded += rows_per_rank * columns
            padded += rows_per_rank * n_shards * columns
        return Sizes(local, padded, sharded)

    def _totals(
        self,
        stage: PlannedStage,
        tp: int,
        ep: int,
        shards: tuple[int, int],
        pipeline: bool,
    ) -> Sizes:
        """Elements of all parameters of a stage on a rank.

        Args:
            shards: number of ranks that shard a dense parameter, and number that shard an expert's.
        """
        local = 0
        padded = 0
        sharded = 0
        tensors = 0
        units = 0
        unit_sizes = {}
        for kind, count in stage.kinds:
            sizes = self.sizes(kind, tp, ep, *shards)
            local += count * sizes.local
            padded += count * sizes.padded
            sharded += count * sizes.sharded
            tensors += count * len(self.spec.kinds[kind].matrices)
            units += count
            unit_sizes[kind] = sizes.padded
        largest = max(unit_sizes.values())
        without_head = [size for kind, size in unit_sizes.items() if self.spec.kinds[kind].role != "head"]
        if self.spec.tied and not pipeline:
            # Embedding and head have one parameter, which was counted twice.
            # The embedding's other matrix, if there is one, has the learned positions, and is smaller.
            shapes = (matrix.local(tp, 1) for matrix in self.spec.kinds[0].matrices)
            rows, dim = max(shapes, key=math.prod)
            tied_shard = -(-rows // shards[0]) * dim
            tied_padded = tied_shard * shards[0]
            local -= rows * dim
            padded -= tied_padded
            sharded -= tied_shard
            # Embedding and head then form one FSDP unit, in which the shared parameter counts once.
            unit_sizes[stage.last_kind] += unit_sizes[0] - tied_padded
            largest = max(largest, unit_sizes[stage.last_kind])
        return Sizes(
            local=local,
            padded=padded,
            sharded=sharded,
            tensors=tensors,
            units=units,
            last=unit_sizes[stage.last_kind],
            largest=largest,
            layer=max(without_head, default=largest),
        )

    def of(self, stage: PlannedStage, trial: Trial) -> Sizes:
        """Elements of the parameters of a stage on a rank."""
        layout = trial.layout
        # Without FSDP, dp_replicate ranks share the optimizer's state too (ZeRO-1).
        ranks = layout.dp_shard
        if trial.unsharded:
            ranks = layout.dp
        shards = ranks * layout.cp
        # tp ranks have the same experts, so FSDP shards experts over tp ranks too.
        expert_shards = max(ranks // layout.ep, 1) * layout.cp * layout.tp
        return self.totals(
            stage,
            layout.tp,
            layout.ep,
            (shards, expert_shards),
            layout.pp > 1,
        )

    def _kept(self, tp: int, unsharded: bool) -> KeptActivations:
        """Bytes per token that a layer of a rank keeps in memory."""
        setting = Setting(
            layout=Layout(dp_shard=1, tp=tp),
            sequence=self.spec.tokens,
            compute=self.compute,
            # FSDP casts a model to the dtype of compute; autocast leaves the residual stream wide.
            residual=self.storage if unsharded else self.compute,
            device=self.device,
        )
        return self.spec.definition.costs.kept(self.spec.config, setting)

    def _activations(
        self,
        stage: PlannedStage,
        tp: int,
        cp: int,
        unsharded: bool,
        checkpointing: str,
        batch: float,
    ) -> Backward:
        """Bytes that one micro-batch keeps for its backward pass on a stage.

        Args:
            unsharded: whether every rank has all parameters that pp, tp and ep leave it.
            batch: number of samples in a micro-batch.
        """
        per_token = self.kept(tp, unsharded)
        tokens = batch * self.spec.tokens / cp
        # Bytes that do not grow with the batch, such as rotary angles.
        positions = self.spec.seq_length / cp * per_token.a_position
        one_layer = getattr(per_token, checkpointing) * tokens
        working = per_token.working * tokens
        if checkpointing == "none":
            one_layer += positions
        else:
            # Backward recomputes one layer, and then holds all of its activations. Those that checkpointing has kept
            # count in `layers` already.
            working += per_token.none * tokens + positions - one_layer
        head = 0.0
        if stage.has_head and stage.layers:
            head = per_token.head * tokens
        return Backward(
            stage.layers * one_layer,
            head,
            working,
            one_layer if stage.layers else 0.0,
        )

    def logits(self, layout: Layout, techniques: Techniques, batch: float) -> tuple[float, float]:
        """Bytes that the loss of one micro-batch takes at its peak.

        Returns:
            Bytes of the logits and of all that the loss makes of them; and bytes of the gradients of the output matrix
            and of its input, which a loss in chunks sums up.
        """
        config = self.spec.config
        if not self.spec.definition.language:
            return 0.0, 0.0
        # The loss is computed in float32 at least.
        # Bytes of an element of the loss.
        wide = max(self.compute, 4)
        tokens = batch * self.spec.tokens / layout.cp
        vocabulary = -(-config.vocab_size // layout.tp)
        if techniques.loss_chunks == 1:
            # These have the size of the logits: the log-softmax, its gradient, and the gradient of the logits. With tp
            # there is one more, the sum of two of them.
            tensors = 4
            if layout.tp == 1:
                tensors = 3
            return tokens * vocabulary * (wide * tensors), 0.0
        chunk = math.ceil(self.spec.tokens / layout.cp / techniques.loss_chunks) * batch
        # Bytes of an element that exists in float32 and, if it differs, in the dtype of compute.
        width = wide
        if self.compute != wide:
            width += self.compute
        # Gradients of the output matrix (vocabulary, dim) and of its input (tokens, dim).
        summed = vocabulary * config.dim * width + tokens * config.dim * self.compute
        # 2: the logits of a chunk are still there while those of the next are made.
        return chunk * vocabulary * 2 * width, summed

    def of_stage(self, stage: PlannedStage, trial: Trial) -> dict[str, float]:
        """Bytes of each part on a rank of a stage, at the moment with the largest sum."""
        return max(self.moments(stage, trial), key=lambda parts: sum(parts.values()))

    def largest(self, trial: Trial, limit: float = math.inf) -> tuple[float, dict[str, float]]:
        """Bytes on the rank that needs most, in all and of each part.

        Args:
            limit: stop at the first rank that needs more than this many bytes.
        """
        most = -1.0
        memory: dict[str, float] = {}
        for stage in trial.stages:
            parts = self.of_stage(stage, trial)
            total = sum(parts.values())
            if total > most:
                memory = parts
                most = total
            if most > limit:
                break
        return most, memory

    def moments(self, stage: PlannedStage, trial: Trial) -> list[dict[str, float]]:
        """Bytes of each part on a rank of a stage, at each of `MOMENTS`."""
        layout = trial.layout
        techniques = trial.techniques
        pipeline = layout.pp > 1
        accumulates = trial.microbatches > 1 or pipeline
        sizes = self.of(stage, trial)
        saved = self.activations(
            stage,
            layout.tp,
            layout.cp,
            trial.unsharded,
            techniques.checkpointing,
            trial.batch,
        )
        logits = 0.0
        summed = 0.0
        if stage.has_head:
            logits, summed = self.logits(layout, techniques, trial.batch)
        # Number of micro-batches whose activations the rank holds.
        n_in_flight = 1.0
        # Inputs that a pipeline rank has received from the stage before.
        received = 0.0
        if pipeline:
            n_in_flight = in_flight(
                techniques.schedule,
                layout.pp,
                stage.coordinate,
                trial.microbatches,
                stage.n_stages,
            )
            boundary = self.kept(layout.tp, trial.unsharded).boundary
            received = boundary * trial.batch * self.spec.tokens / layout.cp * stage.n_stages
        activations = (
            # The loss.
            n_in_flight * (saved.layers + saved.head + received),
            # Backward of the last layer: the head's activations of this micro-batch are freed.
            n_in_flight * (saved.layers + received) + saved.working + (n_in_flight - 1) * saved.head,
            # Backward of the first layer, in the last micro-batch: all other activations are freed.
            saved.layer + saved.working,
            # The end of backward.
            0.0,
        )
        if trial.unsharded or needs_no_fsdp(layout, self.storage != self.compute, techniques):
            moments, parameters, optimizer = self._unsharded(
                techniques.data_parallel,
                sizes,
                accumulates,
                n_in_flight,
            )
        else:
            moments, parameters, optimizer = self._sharded(
                sizes,
                techniques,
                accumulates,
                pipeline,
            )
        memory = [
            {
                "parameters": parameters,
                "gradients": moment.gradients,
                "optimizer": optimizer,
                "activations": activation,
                "gathered": moment.gathered,
                "buffers": moment.buffers,
                "logits": 0.0,
            }
            for moment, activation in zip(moments, activations, strict=True)
        ]
        at_loss = memory[0]
        # The gradients that a loss in chunks sums up exist only at the loss, as buffers of collectives do.
        at_loss["buffers"] += summed
        at_loss["logits"] = logits
        return memory

    def _sharded(
        self,
        sizes: Sizes,
        techniques: Techniques,
        accumulates: bool,
        pipeline: bool,
    ) -> tuple[list[Moment], float, float]:
        """Bytes of fsdp and hsdp, which shard parameters, gradients and optimizer state.

        Args:
            accumulates: whether the gradients of several micro-batches add up.

        Returns:
            What a rank holds at each moment; bytes of its parameters; bytes of its optimizer state.
        """
        storage = self.storage
        # Bytes of this rank's shard of all parameters. The shard of their gradients has as many bytes.
        own = float(sizes.sharded * storage)
        # With offload, shards are on the host.
        on_device = 1.0
        if techniques.offload:
            on_device = 0.0
        # Bytes of this rank's shard for each element of the model.
        shard = own / max(sizes.padded, 1)
        # No unit is freed after forward: the slice of freed units is empty.
        keeps_gathered = RESHARD_AFTER_FORWARD[techniques.reshard_after_forward] == slice(0)
        if pipeline or keeps_gathered:
            gathered_at_loss = float(sizes.local * self.compute)
            gathered_in_backward = gathered_at_loss
            gathered_at_end = gathered_at_loss
        else:
            gathered_at_loss = sizes.last * self.compute
            # One layer, and the next, which is being gathered.
            gathered_in_backward = 2 * sizes.layer * self.compute
            gathered_at_end = sizes.largest * self.compute
        # Bytes of an element that is being reduced. FSDP reduces a copy of the gradient in the dtype of storage. The
        # gradient itself, in the dtype of compute, exists as well, unless it was added to those of earlier
        # micro-batches.
        reduced = storage + self.compute
        if accumulates:
            reduced = storage
        # Gradients that the rank keeps at each moment, besides those that are being reduced: none before backward, the
        # shards of the units that are done, and at the end all shards.
        kept_at_loss = 0.0
        kept_in_last_layer = on_device * shard * sizes.last
        kept_in_first_layer = on_device * (own - shard * sizes.layer)
        kept_at_end = on_device * own
        if accumulates:
            # The unsharded gradients of earlier micro-batches, all the time.
            unsharded = float(sizes.local * storage)
            kept_at_loss = unsharded
            kept_in_last_layer = unsharded
            kept_in_first_layer = unsharded
            kept_at_end += unsharded
        moments = [
            Moment(kept_at_loss, gathered_at_loss, 0.0),
            Moment(kept_in_last_layer, gathered_in_backward, float(sizes.last * storage)),
            Moment(kept_in_first_layer, gathered_in_backward, float(sizes.layer * reduced)),
            Moment(kept_at_end, gathered_at_end, float(sizes.largest * reduced)),
        ]
        return moments, on_device * own, on_device * self.state * own

    def _unsharded(
        self,
        technique: str,
        sizes: Sizes,
        accumulates: bool,
        n_in_flight: float,
    ) -> tuple[list[Moment], float, float]:
        """Bytes of ddp, zero1 and zero2, and of a model that no axis shards: each rank has all parameters.

        Returns what `_sharded` returns.

        Args:
            accumulates: whether the gradients of several micro-batches add up.
            n_in_flight: number of micro-batches under way. Under autocast each has its own copy of the parameters.
        """
        full = float(sizes.local * self.storage)
        own = float(sizes.sharded * self.storage)
        # The copy of the parameters that autocast makes in the dtype of compute.
        copy = 0.0
        if self.compute != self.storage:
            copy = float(sizes.local * self.compute)
        # Gradients that the rank keeps: none before backward, then those of the layers that are done.
        kept_at_loss = 0.0
        kept_in_last_layer = float(sizes.last * self.storage)
        kept_in_first_layer = full - sizes.layer * self.storage
        if accumulates or technique == "ddp":
            # DDP keeps its buckets from step to step.
            kept_at_loss = full
            kept_in_last_layer = full
            kept_in_first_layer = full
        end = Moment(full, copy, 0.0)
        if technique == "zero2":
            # All reductions of a backward pass are under way until its end.
            end = Moment(own, copy, full)
        moments = [
            Moment(kept_at_loss, n_in_flight * copy, 0.0),
            Moment(kept_in_last_layer, n_in_flight * copy, 0.0),
            Moment(kept_in_first_layer, copy, 0.0),
            end,
        ]
        updated = own
        if technique == "ddp":
            updated = full
        return moments, full, self.state * updated

    def on_host(self, trial: Trial) -> float:
        """The most bytes of host memory that a rank takes; 0 without offload."""
        if not trial.techniques.offload:
            return 0.0
        # The stage with the most parameters.
        own = max(self.of(stage, trial).sharded for stage in trial.stages) * self.storage
        # 2: parameters and gradients.
        return own * (2.0 + self.state)
