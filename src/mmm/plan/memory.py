"""What a rank has in memory at the peak of a step, by part, from the model's sizes alone.

The parts are those of the moment at which their sum is largest; of these three::

    loss        all activations, the logits and their gradients
    backward    all activations, the first layers' gradients on their way to the other ranks
    end         no activations, all gradients

With FSDP a rank has a unit gathered, the one after it on its way, and the gradients of one going out. With several
micro-batches a step (and in a pipeline) it has the unsharded gradients of all its layers until the last of them; a
pipeline also keeps its stage gathered, and the activations of the micro-batches that are under way.

It is what this package's trainers do on PyTorch 2.13, in a step after the first. Not counted: the allocator's
fragmentation and the communication library (`Machine.memory_reserve`), and what a kernel uses inside itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mmm.models.transformer import TransformerConfig
from mmm.models.vit import ViTConfig
from mmm.parallel.data.apply import UNSHARDED
from mmm.parallel.data.fsdp import RESHARD_AFTER_FORWARD
from mmm.parallel.mesh import Layout
from mmm.parallel.pipeline.schedules import stages_of
from mmm.parallel.techniques import Techniques
from mmm.plan.activations import Kept, transformer_layer, vit_layer
from mmm.plan.spec import ModelSpec

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits")
WIDTHS = {"bf16": (4, 2), "fp16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}  # dtype → bytes of storage, of compute
STATE = {"adamw": 2, "muon": 1, "sgd": 0}  # elements of optimizer state for a parameter


class Sizes(NamedTuple):
    """Elements of parameters on a rank.

    Attributes:
        local: as tp and ep leave them. padded: until their rows divide over the ranks that shard them; sharded: of
            these its own. tensors, units: how many parameters and FSDP units they are.
        last, largest, layer: padded, of the last part, the largest, and the largest but for the head.
    """

    local: int
    padded: int
    sharded: int
    tensors: int = 0
    units: int = 0
    last: int = 0
    largest: int = 0
    layer: int = 0


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank has. kinds: kind of part → how many. own: how many stages. number: its coordinate."""

    kinds: tuple[tuple[int, int], ...]
    number: int
    has_head: bool
    last_kind: int
    own: int = 1


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
            if matrix.expert and rows % n and shape[1] % n == 0:  # `mmm.parallel.expert.apply` shards their rows
                rows, others = rows * shape[1], math.prod(shape[2:])
            each = -(-rows // n)
            local += math.prod(shape)
            sharded += each * others
            padded += each * n * others
        return Sizes(local, padded, sharded)

    def shards(self, layout: Layout, data_parallel: str) -> tuple[int, int]:
        """Over how many ranks a parameter is sharded, and an expert's."""
        if data_parallel in UNSHARDED:
            return layout.dp, layout.dp
        return layout.dp_shard * layout.cp, max(layout.dp_shard // layout.ep, 1) * layout.cp * layout.tp

    def _of_stage(self, stage: Stage, tp: int, ep: int, shards: tuple[int, int], pipeline: bool) -> Sizes:
        """All parameters of a stage."""
        by_kind = {kind: (self.sizes(kind, tp, ep, *shards), count) for kind, count in stage.kinds}
        local, padded, sharded = (
            sum(count * getattr(sizes, name) for sizes, count in by_kind.values()) for name in Sizes._fields[:3]
        )
        largest = max(sizes.padded for sizes, _ in by_kind.values())
        others = [sizes.padded for kind, (sizes, _) in by_kind.items() if self.spec.kinds[kind].role != "head"]
        if self.spec.tied and not pipeline:  # one parameter, which two parts have
            twice = max(math.prod(m.local(tp, 1)) for m in self.spec.kinds[0].matrices)
            each = -(-twice // shards[0])
            local, padded, sharded = local - twice, padded - each * shards[0], sharded - each
        return Sizes(
            local=local,
            padded=padded,
            sharded=sharded,
            tensors=sum(count * len(self.spec.kinds[kind].matrices) for kind, count in stage.kinds),
            units=sum(count for _, count in stage.kinds),
            last=by_kind[stage.last_kind][0].padded,
            largest=largest,
            layer=max(others, default=largest),
        )

    def of(self, stage: Stage, layout: Layout, data_parallel: str) -> Sizes:
        """Parameters of a stage on a rank of a layout."""
        return self.totals(stage, layout.tp, layout.ep, self.shards(layout, data_parallel), layout.pp > 1)

    def _kept(self, tp: int, replicas: bool) -> Kept:
        config, c = self.spec.config, self.compute
        residual = self.storage if replicas else c
        if isinstance(config, TransformerConfig):
            grouped = self.device == "cpu" or (self.device == "cuda" and c == 2)
            return transformer_layer(config, tp, c, residual, self.device == "cpu", not grouped)
        if isinstance(config, ViTConfig):
            return vit_layer(config, tp, c, residual)
        return Kept(0, 0, 0, 0, 0, 0, 0, 0)

    def _activations(
        self, stage: Stage, tp: int, cp: int, replicas: bool, checkpointing: str, tile: int, batch: float
    ) -> tuple[float, float]:
        """Bytes that one micro-batch leaves for backward on a stage, and that its backward needs on top.

        Args:
            replicas: whether every rank keeps the full model. batch: samples of a micro-batch.
        """
        kept = self.kept(tp, replicas)
        tokens = batch * self.spec.tokens / cp
        positions = self.spec.seq_length / cp * kept.a_position
        a_layer, everything = getattr(kept, checkpointing) * tokens, kept.none * tokens + positions
        working = kept.working * tokens
        if tile > 1:  # a tile is computed again in backward, and is all there is of the MLP's
            tiles = min(tile, max(self.spec.tokens // (cp * tp), 1))
            spared = kept.tiled * tokens
            everything, working = everything - spared, (working + spared) / tiles
            a_layer -= spared if checkpointing == "none" else 0.0
        if checkpointing == "none":
            a_layer += positions
        else:
            working += everything - kept.full * tokens  # one layer is computed again
        total = 0.0
        for number, count in stage.kinds:
            kind = self.spec.kinds[number]
            if kind.role == "layer":
                total += count * a_layer
            elif kind.role == "head":
                total += kept.head * tokens
            elif kind.role == "module":
                total += count * kind.saved * self.compute * batch
        return total, working

    def logits(self, layout: Layout, techniques: Techniques, batch: float) -> tuple[float, float]:
        """Bytes of the logits of a micro-batch and all that the loss makes of them, at their peak; and of the gradient
        of the output matrix that a loss in chunks sums up."""
        config = self.spec.config
        if not isinstance(config, TransformerConfig):
            return 0.0, 0.0
        s, c = max(self.compute, 4), self.compute
        tokens = batch * self.spec.tokens / layout.cp
        vocabulary = -(-config.vocab_size // layout.tp)
        if techniques.loss_chunks == 1:
            # log-softmax, its gradient, and that of the logits; under tp the sum of two more
            return tokens * vocabulary * (s * 3 if layout.tp == 1 else s * 4), 0.0
        matrix = vocabulary * config.dim
        chunk = math.ceil(self.spec.tokens / layout.cp / techniques.loss_chunks) * batch
        return chunk * vocabulary * (s + (c if c != s else 0)), matrix * (s + (c if c != s else 0))

    def of_stage(
        self, stage: Stage, layout: Layout, techniques: Techniques, batch: float, microbatches: int
    ) -> dict[str, float]:
        """Bytes by part, on a rank of a stage, at the peak.

        Args:
            layout: fitted. batch: samples of a micro-batch. microbatches: of a step.
        """
        technique, storage, compute = techniques.data_parallel, self.storage, self.compute
        sizes, replicas = self.of(stage, layout, technique), technique in UNSHARDED
        shards = self.shards(layout, technique)[0]
        activations, working = self.activations(
            stage, layout.tp, layout.cp, replicas, techniques.checkpointing, techniques.tile, batch
        )
        logits, summed = self.logits(layout, techniques, batch) if stage.has_head else (0.0, 0.0)
        pipeline = layout.pp > 1
        if pipeline:
            flying = in_flight(techniques.schedule, layout.pp, stage.number, microbatches, stage.own)
            passed = self.kept(layout.tp, False).boundary * batch * self.spec.tokens / layout.cp
            activations = flying * (activations + passed * stage.own)
        if replicas:
            parts = self._replicas(technique, sizes, activations, working, logits, summed, microbatches)
        else:
            unsharded = sizes.local * storage if microbatches > 1 or pipeline else 0.0
            own, head, layer, largest = sizes.sharded * storage, sizes.last, sizes.layer, sizes.largest
            never = pipeline or RESHARD_AFTER_FORWARD[techniques.reshard_after_forward] == slice(0)
            gathered = sizes.local * compute if never else 0.0
            outgoing = head * storage + summed
            loss = {
                "gradients": unsharded,
                "activations": activations,
                "gathered": gathered or head * compute,
                "buffers": summed,
                "logits": logits,
            }
            backward = {
                "gradients": unsharded or min(own, head * storage / shards),
                "activations": activations + working,
                "gathered": gathered or 2 * layer * compute,
                "buffers": layer * compute + (outgoing - summed if not unsharded else 0),
                "logits": 0.0,
            }
            end = {
                "gradients": own + unsharded,
                "activations": 0.0,
                "gathered": gathered or largest * compute,
                "buffers": largest * (storage + (0 if unsharded else compute)),
                "logits": 0.0,
            }
            base = {"parameters": own, "optimizer": self.state * own}
            if techniques.offload:  # shards, their gradients and state are on the host
                for moment in (loss, backward, end):
                    moment["gradients"] -= own if moment is end else 0.0
                    moment["gradients"] = max(moment["gradients"], 0.0)
                base = {"parameters": 0.0, "optimizer": 0.0}
            parts = {**base, **max((loss, backward, end), key=lambda moment: sum(moment.values()))}
        return {name: parts[name] for name in PARTS}

    def _replicas(
        self,
        technique: str,
        sizes: Sizes,
        activations: float,
        working: float,
        logits: float,
        summed: float,
        microbatches: int,
    ) -> dict[str, float]:
        """Of ddp, zero1 and zero2, which have all parameters, and where autocast is on a copy of them to compute in."""
        storage, local, own = self.storage, sizes.local, sizes.sharded * self.storage
        copied = local * self.compute if self.compute != storage else 0.0
        before = local * storage if microbatches > 1 or technique == "ddp" else 0.0
        gradients = local * storage  # at the end of backward; of zero2 all are on their way until then
        moments = (
            {"gradients": before, "activations": activations, "buffers": summed, "logits": logits},
            {"gradients": before, "activations": activations + working, "buffers": summed, "logits": 0.0},
            {
                "gradients": own if technique == "zero2" else gradients,
                "activations": 0.0,
                "buffers": gradients if technique == "zero2" else 0.0,
                "logits": 0.0,
            },
        )
        state = own if technique != "ddp" else local * storage
        base = {"parameters": float(local * storage), "optimizer": self.state * state, "gathered": copied}
        return {**base, **max(moments, key=lambda moment: sum(moment.values()))}

    def on_host(self, stage: Stage, layout: Layout, techniques: Techniques) -> float:
        """Bytes of the host that a rank with offload takes."""
        if not techniques.offload:
            return 0.0
        return self.of(stage, layout, techniques.data_parallel).sharded * self.storage * (2.0 + self.state)


def stages_for(spec: ModelSpec, splits: list[range], schedule: str, pp: int) -> list[Stage]:
    """What each pipeline rank has, by coordinate.

    Args:
        splits: the parts of each stage. schedule: which says which rank has which stage.
    """
    own = len(splits) // pp
    found = []
    for coordinate in range(pp):
        numbers = stages_of(coordinate, pp, schedule, own)
        kinds = Counter(spec.sequence[part] for number in numbers for part in splits[number])
        has_head = len(splits) - 1 in numbers
        last = spec.sequence[splits[max(numbers)][-1]]
        found.append(Stage(tuple(sorted(kinds.items())), coordinate, has_head, last, own))
    return found


def distinct(stages: list[Stage]) -> list[Stage]:
    """Of stages that are alike the first, which has the most micro-batches under way."""
    found: dict[tuple[object, ...], Stage] = {}
    for stage in stages:
        found.setdefault((stage.kinds, stage.has_head, stage.last_kind), stage)
    return list(found.values())


def whole_model(spec: ModelSpec) -> Stage:
    kinds = Counter(spec.sequence)
    return Stage(tuple(sorted(kinds.items())), 0, True, spec.sequence[-1])
