"""How long a step takes, and what a rank sends in it: arithmetic on a `Machine`.

::

    step = (micro-batches · slowest stage) / (1 - bubble) + gathering and reducing that nothing hides + optimizer
    a layer's forward = products / (peak · matmul_efficiency) + element-wise bytes / (memory_bandwidth · …)
    its backward      = twice that, and what checkpointing computes again
    a collective      = messages one after the other · latency + bytes that a rank sends / bandwidth

Tensor parallelism, Ulysses and experts' all-to-all wait for each collective; a ring of cp hides what its attention
takes; data parallelism hides behind `Machine.overlap` of the compute around it. Messages: n - 1 in a ring, first inside
a host, then between hosts; an all-reduce may take a tree, 2 log2 n. The bubble is `mmm.analysis.bubble.bubble_formula`'s.

Bytes are those of `mmm.analysis.traffic_formulas`, by axis, inside and between hosts: of a group with k ranks on each of
its hosts one in k sends to another host.

Sources: those of the two modules named; Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005 (latency and bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mmm.analysis.bubble import bubble_formula
from mmm.models.transformer import TransformerConfig
from mmm.models.vit import ViTConfig
from mmm.parallel.data.apply import UNSHARDED
from mmm.parallel.data.fsdp import RESHARD_AFTER_FORWARD
from mmm.parallel.mesh import Layout
from mmm.parallel.pipeline.schedules import SCHEDULES
from mmm.parallel.techniques import Techniques
from mmm.plan.machine import Machine
from mmm.plan.memory import MemoryModel, Stage
from mmm.plan.network import Group, collective, groups_of
from mmm.plan.spec import ModelSpec


class Layer(NamedTuple):
    """Seconds of a layer and micro-batch: forward and backward compute, and what each axis makes it wait."""

    forward: float
    backward: float
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step. exposed: by axis, what a rank waits for. bubble: the fraction that stages wait for others."""

    seconds: float
    compute: float
    exposed: Mapping[str, float]
    bubble: float
    optimizer: float
    offload: float


def bubble_of(schedule: str, pp: int, microbatches: int, own: int) -> float:
    """The fraction of a step that stages wait: by `bubble_formula`, or where that has none, with too few micro-batches,
    as of stages that take turns and do not split their backward.

    Args:
        own: stages a rank.
    """
    if (known := bubble_formula(schedule, pp, microbatches, own)) is not None:
        return known
    if microbatches >= pp:
        return (pp - 1) / (microbatches * own + pp - 1)
    return 1 - microbatches * own / (pp * own + microbatches - 1)


class CostModel:
    """Step times of a model on a machine. dtype: name of a precision. memory: of the same model."""

    def __init__(self, spec: ModelSpec, machine: Machine, dtype: str, memory: MemoryModel) -> None:
        self.spec, self.machine, self.memory = spec, machine, memory
        self.rate = machine.peak(dtype) * machine.matmul_efficiency
        self.memory_rate = machine.memory_bandwidth * machine.memory_efficiency
        self.layer = lru_cache(maxsize=None)(self._layer)
        self.head = lru_cache(maxsize=None)(self._head)
        self.groups = lru_cache(maxsize=None)(lambda layout: groups_of(layout, machine))

    def _busy(self, flops: float, traffic: float) -> float:
        """Seconds of a layer's forward: kernels, or where those are short what the host takes to start them."""
        seconds = flops / self.rate + traffic / self.memory_rate
        overhead = self.machine.layer_overhead
        return seconds + overhead if self.machine.device == "cpu" else max(seconds, overhead)

    def _layer(
        self, tp: int, cp: int, ep: int, batch: float, checkpointing: str, tile: int, style: str, replicas: bool, splits: bool
    ) -> Layer:
        spec, machine, c = self.spec, self.machine, self.memory.compute
        kind = next((kind for kind in spec.kinds if kind.role == "layer"), None)
        if kind is None:
            return Layer(0.0, 0.0)
        layout = Layout(dp_shard=ep, cp=cp, tp=tp, ep=ep)
        groups = self.groups(layout)
        kept = self.memory.kept(tp, replicas)
        tokens = batch * spec.tokens / cp
        scores = kind.attention_flops / 2 * batch / (tp * cp)
        flops = kind.flops * batch / (tp * cp) - scores
        forward = self._busy(flops, tokens * kept.traffic)
        again = {"none": 0.0, "selective": tokens * kept.traffic / self.memory_rate, "full": forward}[checkpointing]
        again *= 2 if splits else 1  # once for the input's gradient, once for the weights'
        config, waits = spec.config, {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        repeated = 1.0 if checkpointing != "none" else 0.0
        if tile > 1:
            again += 4 * config.dim * config.hidden_dim * tokens / tp / self.rate  # the first two products
        if isinstance(config, ViTConfig) and tp > 1:
            size = tokens * config.dim * c
            waits["tp"] = (4 + 2 * repeated) * collective("all_reduce", groups["tp"], size, machine)
        elif isinstance(config, TransformerConfig):
            if tp > 1:
                each = 2 if config.n_experts else 4
                size = tokens * config.dim * c
                waits["tp"] = each * (2 + repeated) * collective("all_gather", groups["tp"], size, machine)
            if cp > 1:
                waits["cp"] = self._context(groups["cp"], tp, tokens, scores, style, repeated)
            if ep > 1:
                size = tokens / tp * config.top_k * config.dim * c
                waits["ep"] = (4 + 2 * repeated) * collective("all_to_all", groups["ep"], size, machine)
        return Layer(forward, 2 * forward + again, **waits)

    def _context(self, group: Group, tp: int, tokens: float, scores: float, style: str, repeated: float) -> float:
        """Seconds that attention over cp waits in a layer."""
        config, c, machine, n = self.spec.config, self.memory.compute, self.machine, group.size
        kv = max(config.n_kv_heads / tp, 1) * config.head_dim * tokens * c  # keys, or values
        if style == "ulysses":
            heads = config.n_heads / tp
            sent = (2 * heads + 2 * math.lcm(max(config.n_kv_heads // tp, 1), n)) * config.head_dim * tokens * c
            return (2 + repeated) * collective("all_to_all", group, sent, machine, calls=2)
        outside = machine.network_bandwidth * machine.network_efficiency / machine.gpus_per_host
        rate = outside if group.crosses else machine.link_bandwidth * machine.link_efficiency
        latency = machine.network_latency if group.crosses else machine.link_latency
        hop, hidden = 2 * kv / rate + latency, scores / n / self.rate
        wide = max(4 / c, 1.0)
        # What each hop adds to the sums of the others, in float32: read, read the hop's, write.
        merged = 12 * config.n_heads / tp * config.head_dim * tokens / self.memory_rate
        forward = (n - 1) * (max(hop - hidden, 0.0) + merged)
        backward = n * (max((1 + wide) * hop - 2 * hidden, 0.0) + merged)
        return (1 + repeated) * forward + backward

    def _head(self, tp: int, cp: int, batch: float, chunks: int) -> tuple[float, float]:
        """Seconds of embedding, output and loss: compute, and what tp waits."""
        spec, c = self.spec, self.memory.compute
        tokens = batch * spec.tokens / cp
        flops = sum(kind.flops for kind in spec.kinds if kind.role in ("embedding", "head")) * batch / (tp * cp)
        if not isinstance(spec.config, TransformerConfig):
            return 3 * flops / self.rate, 0.0
        times = 4 if chunks > 1 else 3
        traffic = tokens * (spec.config.vocab_size / tp * (3 * c + 32) + 12 * c * spec.config.dim)
        size = tokens * spec.config.dim * c
        waits = 4 * collective("all_gather", self.groups(Layout(tp=tp, dp_shard=1))["tp"], size, self.machine)
        return times * flops / self.rate + traffic / self.memory_rate, waits

    def step(
        self, stages: list[Stage], layout: Layout, techniques: Techniques, batch: float, microbatches: int
    ) -> StepCost:
        """Seconds of a step.

        Args:
            stages: of each coordinate on pp. batch: samples of a micro-batch.
        """
        machine, spec, groups = self.machine, self.spec, self.groups(layout)
        replicas = techniques.data_parallel in UNSHARDED
        layer = self.layer(
            layout.tp,
            layout.cp,
            layout.ep,
            batch,
            techniques.checkpointing,
            techniques.tile,
            techniques.cp_style,
            replicas,
            layout.pp > 1 and SCHEDULES[techniques.schedule].splits,
        )
        head, head_waits = self.head(layout.tp, layout.cp, batch, techniques.loss_chunks)
        slowest, compute, tp_waits, layers_of_slowest, p2p = 0.0, 0.0, 0.0, 0, 0.0
        module_flops = 0.0
        for stage in stages:
            layers, flops = 0, 0.0
            for number, count in stage.kinds:
                kind = spec.kinds[number]
                layers += count * (kind.role == "layer")
                flops += 3 * count * kind.flops * (kind.role == "module")
            busy = layers * (layer.forward + layer.backward) + flops * batch / layout.tp / self.rate
            waits = layers * layer.tp
            if stage.has_head:
                busy, waits = busy + head, waits + head_waits
            total = busy + waits + layers * (layer.cp + layer.ep)
            if total > slowest:
                slowest, compute, tp_waits, layers_of_slowest, module_flops = total, busy, waits, layers, flops
        bubble = 0.0
        if layout.pp > 1:
            own = stages[0].own
            passed = self.memory.kept(layout.tp, False).boundary * batch * spec.tokens / layout.cp
            rate = machine.network_bandwidth * machine.network_efficiency / machine.gpus_per_host
            if not groups["pp"].crosses:
                rate = machine.link_bandwidth * machine.link_efficiency
            latency = machine.network_latency if groups["pp"].crosses else machine.link_latency
            p2p = 2 * own * (passed / rate + latency)
            slowest += p2p
            bubble = bubble_of(techniques.schedule, layout.pp, microbatches, own)
        busy = microbatches * slowest
        exposed = {
            "tp": microbatches * tp_waits,
            "cp": microbatches * layers_of_slowest * layer.cp,
            "ep": microbatches * layers_of_slowest * layer.ep,
            "pp": microbatches * p2p,
        }
        forward = layers_of_slowest * layer.forward + head / 3 + module_flops / 3 * batch / self.rate
        dp, replicate, local = self._data_parallel(stages, layout, techniques, microbatches, forward, compute - forward)
        exposed |= {"dp_shard": dp, "dp_replicate": replicate}
        storage = self.memory.storage
        optimizer = 10 * storage * local / self.memory_rate
        offload = 0.0
        if techniques.offload:
            gathers = 1 if replicas or layout.pp > 1 else 2 * microbatches
            moved = storage * local * (1 + gathers)
            offload = moved / (machine.host_link_bandwidth or machine.memory_bandwidth)
            optimizer = 10 * storage * local * machine.gpus_per_host / (machine.host_memory_bandwidth or self.memory_rate)
        seconds = busy / (1 - bubble) + dp + replicate + optimizer + offload
        return StepCost(
            seconds=seconds,
            compute=microbatches * compute,
            exposed={axis: wait for axis, wait in exposed.items() if wait > 0},
            bubble=bubble,
            optimizer=optimizer,
            offload=offload,
        )

    def _data_parallel(
        self,
        stages: list[Stage],
        layout: Layout,
        techniques: Techniques,
        microbatches: int,
        forward: float,
        backward: float,
    ) -> tuple[float, float, int]:
        """Seconds that dp_shard (with cp) and dp_replicate make a step wait, of the rank with most parameters; and the
        elements of these that it updates.

        Args:
            forward, backward: seconds of compute of a micro-batch that communication can hide behind.
        """
        machine, memory, groups = self.machine, self.memory, self.groups(layout)
        technique, hide = techniques.data_parallel, machine.overlap
        unsharded = technique in UNSHARDED
        sizes = max((memory.of(stage, layout, technique) for stage in stages), key=lambda of: of.local)
        local, padded, sharded, tensors, units = sizes[:5]
        storage, compute = memory.storage, memory.compute
        if unsharded:
            group = groups["dp_replicate"] if layout.dp_replicate > 1 else groups["dp_shard"]
            axis = 1 if layout.dp_replicate > 1 else 0
            size = float(local * storage)
            if technique == "ddp":
                reduce = collective("all_reduce", group, size, machine, calls=max(1, round(size / 25e6)))
            else:
                reduce = collective(
                    "all_reduce" if technique == "zero1" else "reduce_scatter", group, size, machine, calls=tensors
                )
            waits = max(reduce - hide * backward, 0.1 * reduce)
            if technique != "ddp":
                waits += collective("all_gather", group, size, machine, calls=tensors)
            return (0.0, waits, sharded) if axis else (waits, 0.0, local if technique == "ddp" else sharded)
        group = groups["fsdp"]
        gather = collective("all_gather", group, padded * compute, machine, calls=units)
        reduce = collective("reduce_scatter", group, padded * storage, machine, calls=units)
        replicate = collective("all_reduce", groups["dp_replicate"], sharded * storage, machine, calls=units)
        first = gather / max(units, 1)
        if layout.pp > 1:
            waits = max(gather - hide * forward, first) + reduce
            return waits, replicate, sharded
        again = {"auto": 1 - 1 / max(units, 1), "always": 1.0, "never": 0.0}[techniques.reshard_after_forward] * gather
        assert techniques.reshard_after_forward in RESHARD_AFTER_FORWARD
        waits = microbatches * (max(gather - hide * forward, first) + max(again - hide * backward, 0.0))
        last = max(again + reduce - hide * backward, 0.1 * reduce) - max(again - hide * backward, 0.0)
        left = max(hide * backward - again - reduce, 0.0)
        return waits + max(last, 0.0), max(replicate - left, 0.1 * replicate), sharded
