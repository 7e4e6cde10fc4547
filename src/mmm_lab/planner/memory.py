"""What a rank has in memory at the peak of a step, by part, from the model's sizes alone.

The parts are those of the moment at which their sum is largest; of these::

    loss        all activations, the logits and their gradients
    backward    all layers' activations, what backward of the last one needs on top, the head's gradients
    first       one layer's activations, what its backward needs, the gradients of all layers
    end         no activations, all gradients, those of the embedding on their way to the other ranks

With FSDP a rank has a unit gathered, the one after it on its way, and the gradients of one going out. With several
micro-batches a step (and in a pipeline) it has the unsharded gradients of all its layers until the last of them; a
pipeline also keeps its stage gathered, and the activations of the micro-batches that are under way.

It is what this package's trainers do on PyTorch 2.13, in a step after the first. Not counted: the allocator's
fragmentation and the communication library (`Machine.memory_reserve`), and what a kernel uses inside itself.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from mmm.layout import Layout, Techniques
from mmm.models.costs import KeptActivations, Setting
from mmm.parallel.dp.data_parallel import needs_no_fsdp
from mmm.parallel.dp.fsdp import RESHARD_AFTER_FORWARD
from mmm.parallel.footprint import STATE
from mmm_lab.planner.spec import ModelSpec, Sizes
from mmm_lab.planner.trial import PlannedStage, Trial

Moment = tuple[float, float, float]  # bytes of gradients, gathered parameters, buffers
PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits")
MOMENTS = ("the loss", "backward of the last layer", "backward of the first", "the end of backward")
WIDTHS = {"bf16": (4, 2), "fp16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}  # dtype → bytes of storage, of compute


class Backward(NamedTuple):
    """Bytes that a micro-batch leaves for backward: of all layers, of the head, of one layer; and what backward of a
    layer needs on top."""

    layers: float
    head: float
    working: float
    layer: float


def in_flight(schedule: str, pp: int, coordinate: int, microbatches: int, own: int) -> float:
    """Forwards of a rank whose backward is still to come, at most, in micro-batches through all of its stages.

    Of the schedules that split backward an upper bound, which the delay of the weights' part makes.
    """
    m, p, r, v = microbatches, pp, coordinate, own
    if schedule in ("GPipe", "LoopedBFS"):
        return m
    if schedule == "1F1B":
        return min(m, p - r)
    if schedule == "Interleaved1F1B":
        return min(m * v, (v - 1) * p + 2 * (p - r - 1) + 1) / v
    if schedule == "InterleavedZeroBubble":
        return min(m * v, (v - 1) * p + 2 * (p - r - 1) + 1 + p) / v
    return min(m * v, 2 * p + 1) / v  # ZBVZeroBubble, DualPipeV


class MemoryModel:
    """Memory of the ranks of a model.

    Args:
        device: cuda, xpu or cpu: kernels differ. dtype: name of a precision. optimizer: a key of `STATE`.
    """

    def __init__(self, spec: ModelSpec, device: str, dtype: str, optimizer: str = "adamw") -> None:
        self.spec, self.device = spec, device
        self.storage, self.compute = WIDTHS[dtype]
        self.state = STATE[optimizer]
        self.sizes = lru_cache(maxsize=None)(self._sizes)
        self.kept = lru_cache(maxsize=None)(self._kept)
        self.totals = lru_cache(maxsize=None)(self._of_stage)
        self.activations = lru_cache(maxsize=None)(self._activations)

    def _sizes(self, kind: int, tp: int, ep: int, shards: int, expert_shards: int) -> Sizes:
        local = padded = sharded = 0
        for matrix in self.spec.kinds[kind].matrices:
            shape = matrix.local(tp, ep)
            n = expert_shards if matrix.expert else shards
            rows, others = shape[0], math.prod(shape[1:])
            if matrix.expert and rows % n and shape[1] % n == 0:  # `mmm.parallel.ep.expert_parallel` shards their rows
                rows, others = rows * shape[1], math.prod(shape[2:])
            each = -(-rows // n)
            local += math.prod(shape)
            sharded += each * others
            padded += each * n * others
        return Sizes(local, padded, sharded)

    def _of_stage(self, stage: PlannedStage, tp: int, ep: int, shards: tuple[int, int], pipeline: bool) -> Sizes:
        """All parameters of a stage."""
        by_kind = {kind: (self.sizes(kind, tp, ep, *shards), count) for kind, count in stage.kinds}
        local, padded, sharded = (
            sum(count * getattr(sizes, name) for sizes, count in by_kind.values()) for name in Sizes._fields[:3]
        )
        units = {kind: sizes.padded for kind, (sizes, _) in by_kind.items()}
        largest = max(units.values())
        others = [size for kind, size in units.items() if self.spec.kinds[kind].role != "head"]
        if self.spec.tied and not pipeline:  # one parameter, which two parts have
            rows, dim = max((m.local(tp, 1) for m in self.spec.kinds[0].matrices), key=math.prod)
            each = -(-rows // shards[0]) * dim
            local, padded, sharded = local - rows * dim, padded - each * shards[0], sharded - each
            units[stage.last_kind] += units[0] - each * shards[0]  # and one unit, which also has learned positions
            largest = max(largest, units[stage.last_kind])
        return Sizes(
            local=local,
            padded=padded,
            sharded=sharded,
            tensors=sum(count * len(self.spec.kinds[kind].matrices) for kind, count in stage.kinds),
            units=sum(count for _, count in stage.kinds),
            last=units[stage.last_kind],
            largest=largest,
            layer=max(others, default=largest),
        )

    def of(self, stage: PlannedStage, trial: Trial) -> Sizes:
        """Parameters of a stage on a rank."""
        layout = trial.layout
        ranks = layout.dp if trial.unsharded else layout.dp_shard
        shards = ranks * layout.cp
        expert_shards = max(ranks // layout.ep, 1) * layout.cp * layout.tp
        return self.totals(stage, layout.tp, layout.ep, (shards, expert_shards), layout.pp > 1)

    def _kept(self, tp: int, replicas: bool) -> KeptActivations:
        setting = Setting(
            layout=Layout(dp_shard=1, tp=tp),
            sequence=self.spec.tokens,
            compute=self.compute,
            residual=self.storage if replicas else self.compute,
            device=self.device,
        )
        return self.spec.definition.costs.kept(self.spec.config, setting)

    def _activations(
        self, stage: PlannedStage, tp: int, cp: int, replicas: bool, checkpointing: str, batch: float
    ) -> Backward:
        """What one micro-batch leaves for backward on a stage.

        Args:
            replicas: whether every rank keeps the full model. batch: samples of a micro-batch.
        """
        kept = self.kept(tp, replicas)
        tokens = batch * self.spec.tokens / cp
        positions = self.spec.seq_length / cp * kept.a_position
        a_layer, everything = getattr(kept, checkpointing) * tokens, kept.none * tokens + positions
        working = kept.working * tokens
        if checkpointing == "none":
            a_layer += positions
        else:
            working += everything - a_layer  # one layer is computed again
        layers = sum(count for number, count in stage.kinds if self.spec.kinds[number].role == "layer")
        head = kept.head * tokens if stage.has_head and layers else 0.0
        return Backward(layers * a_layer, head, working, a_layer if layers else 0.0)

    def logits(self, layout: Layout, techniques: Techniques, batch: float) -> tuple[float, float]:
        """Bytes of the logits of a micro-batch and all that the loss makes of them, at their peak; and of the gradients
        of the output matrix and of its input that a loss in chunks sums up."""
        config = self.spec.config
        if not self.spec.definition.language:
            return 0.0, 0.0
        s, c = max(self.compute, 4), self.compute
        tokens = batch * self.spec.tokens / layout.cp
        vocabulary = -(-config.vocab_size // layout.tp)
        if techniques.loss_chunks == 1:
            # log-softmax, its gradient, and that of the logits; under tp the sum of two more
            return tokens * vocabulary * (s * 3 if layout.tp == 1 else s * 4), 0.0
        chunk = math.ceil(self.spec.tokens / layout.cp / techniques.loss_chunks) * batch
        mixed = c if c != s else 0
        # The logits of a chunk are still there while those of the next are made.
        summed = vocabulary * config.dim * (s + mixed) + tokens * config.dim * c
        return chunk * vocabulary * 2 * (s + mixed), summed

    def of_stage(self, stage: PlannedStage, trial: Trial) -> dict[str, float]:
        """Bytes by part, on a rank of a stage, at the peak: of the `moments` the one that needs most."""
        return max(self.moments(stage, trial), key=lambda parts: sum(parts.values()))

    def largest(self, trial: Trial, limit: float = math.inf) -> tuple[float, dict[str, float]]:
        """Bytes of the rank that needs most, and by part; of the first one that needs more than `limit`."""
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
        """Bytes by part, on a rank of a stage of a fitted layout, at each of `MOMENTS`."""
        layout, techniques, replicas = trial.layout, trial.techniques, trial.unsharded
        pipeline = layout.pp > 1
        several = trial.microbatches > 1 or pipeline  # gradients of several micro-batches add up
        sizes = self.of(stage, trial)
        left = self.activations(stage, layout.tp, layout.cp, replicas, techniques.checkpointing, trial.batch)
        logits, summed = self.logits(layout, techniques, trial.batch) if stage.has_head else (0.0, 0.0)
        flying, passed = 1.0, 0.0
        if pipeline:
            flying = in_flight(techniques.schedule, layout.pp, stage.number, trial.microbatches, stage.own)
            passed = self.kept(layout.tp, replicas).boundary * trial.batch * self.spec.tokens / layout.cp * stage.own
        activations = (
            flying * (left.layers + left.head + passed),
            flying * (left.layers + passed) + left.working + (flying - 1) * left.head,
            left.layer + left.working,
            0.0,
        )
        if replicas or needs_no_fsdp(layout, self.storage != self.compute, techniques):
            moments, base = self._replicas(techniques.data_parallel, sizes, several, flying)
        else:
            moments, base = self._sharded(sizes, techniques, several, pipeline)
        return [
            {
                "parameters": base[0],
                "gradients": gradients,
                "optimizer": base[1],
                "activations": kept,
                "gathered": gathered,
                "buffers": buffers + (summed if number == 0 else 0.0),
                "logits": logits if number == 0 else 0.0,
            }
            for number, ((gradients, gathered, buffers), kept) in enumerate(zip(moments, activations, strict=True))
        ]

    def _sharded(
        self, sizes: Sizes, techniques: Techniques, several: bool, pipeline: bool
    ) -> tuple[tuple[Moment, ...], tuple[float, float]]:
        """Of fsdp and hsdp: gradients, gathered parameters and buffers of each moment; parameters and optimizer."""
        storage, compute, own = self.storage, self.compute, float(sizes.sharded * self.storage)
        shard = own / max(sizes.padded, 1)  # bytes of a rank's gradients for an element of the model
        moved = 0.0 if techniques.offload else 1.0  # with offload a rank's gradients are on the host
        unsharded = float(sizes.local * storage) if several else 0.0
        never = pipeline or RESHARD_AFTER_FORWARD[techniques.reshard_after_forward] == slice(0)
        everything = float(sizes.local * compute) if never else 0.0
        # A gradient in the dtype of compute, and the same on its way; with several micro-batches it is there already.
        leaving = storage if several else storage + compute
        layer, largest, last = sizes.layer, sizes.largest, sizes.last
        moments = (
            (unsharded, everything or last * compute, 0.0),
            (unsharded or moved * shard * last, everything or 2 * layer * compute, float(last * storage)),
            (
                unsharded or moved * (own - shard * layer),
                everything or 2 * layer * compute,
                float(layer * leaving),
            ),
            (unsharded + moved * own, everything or largest * compute, float(largest * leaving)),
        )
        return moments, (moved * own, moved * self.state * own)

    def _replicas(
        self, technique: str, sizes: Sizes, several: bool, flying: float
    ) -> tuple[tuple[Moment, ...], tuple[float, float]]:
        """As `_sharded`, of ddp, zero1, zero2 and a model left as it is: all parameters, and where autocast is on a
        copy to compute in, which each micro-batch under way has.

        Args:
            several: whether gradients of several micro-batches add up.
        """
        full, own = float(sizes.local * self.storage), float(sizes.sharded * self.storage)
        copied = float(sizes.local * self.compute) if self.compute != self.storage else 0.0
        before = full if several or technique == "ddp" else 0.0  # DDP's buckets stay
        # All reductions of a backward are under way until its end.
        gradients, outgoing = (own, full) if technique == "zero2" else (full, 0.0)
        layer = sizes.layer * self.storage
        moments = (
            (before, flying * copied, 0.0),
            (before or float(sizes.last * self.storage), flying * copied, 0.0),
            (before or full - layer, copied, 0.0),
            (gradients, copied, outgoing),
        )
        return moments, (full, self.state * (full if technique == "ddp" else own))

    def on_host(self, trial: Trial) -> float:
        """Bytes of the host's memory that a rank with offload takes, at most."""
        if not trial.techniques.offload:
            return 0.0
        own = max(self.of(stage, trial).sharded for stage in trial.stages) * self.storage
        return own * (2.0 + self.state)  # parameters, gradients and the optimizer's state
