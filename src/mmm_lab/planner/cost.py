"""How long a step takes: arithmetic on a `Machine`.

::

    step = (micro-batches · slowest stage) / (1 - bubble) + gathering and reducing that nothing hides + optimizer
    a layer's forward = products / (peak · matmul_efficiency) + element-wise bytes / (memory_bandwidth · …)
    its backward      = twice that, and what checkpointing computes again
    a collective      = messages one after the other · latency + bytes that a rank sends / bandwidth
    a unit of FSDP    = its collectives, and the copies out of the gathered buffer and into the reduced one

Tensor parallelism, Ulysses and experts' all-to-all wait for each collective (see network.py); a ring of cp hides
behind `Machine.overlap` of its attention, data parallelism behind as much of the compute around it. The bubble is
`bubble_formula`'s. Ranks on more than the cores of a host (`Machine.cores`) take turns: their step is as long as those
need for what all ranks together compute and send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mmm.layout import Layout
from mmm.models.costs import heads_over_cp
from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.schedules import SCHEDULES
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import Group, collective, group_of, groups_of, peak_rate, send
from mmm_lab.planner.spec import ModelSpec
from mmm_lab.planner.trial import Trial
from mmm_launch.machines.machine import Machine


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


class Work(NamedTuple):
    """Seconds of a step without data parallelism, of the slowest stage; forward and backward of a micro-batch."""

    seconds: float
    bubble: float
    compute: float
    forward: float
    backward: float
    exposed: dict[str, float]


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
        self.rate = peak_rate(machine, dtype) * machine.matmul_efficiency
        self.memory_rate = machine.memory_bandwidth * machine.memory_efficiency
        self.work = lru_cache(maxsize=None)(self._work)
        self.layer = lru_cache(maxsize=None)(self._layer)
        self.head = lru_cache(maxsize=None)(self._head)
        self.groups = lru_cache(maxsize=None)(lambda layout: groups_of(layout, machine))

    def _busy(self, flops: float, traffic: float, tp: int) -> float:
        """Seconds of a layer's forward: kernels, or where those are short what the host takes to start them."""
        seconds = flops / self.rate + traffic / self.memory_rate
        overhead = self.machine.layer_overhead + (self.machine.tensor_overhead if tp > 1 else 0.0)
        return seconds + overhead if self.machine.device == "cpu" else max(seconds, overhead)

    def _layer(
        self,
        tp: int,
        cp: int,
        ep: int,
        batch: float,
        checkpointing: str = "none",
        ulysses: int = 1,
        replicas: bool = False,
        splits: bool = False,
    ) -> Layer:
        spec, machine, c = self.spec, self.machine, self.memory.compute
        kind = next(kind for kind in spec.kinds if kind.role == "layer")
        layout = Layout(dp_shard=ep, cp=cp, tp=tp, ep=ep)
        groups = self.groups(layout)
        kept = self.memory.kept(tp, replicas)
        tokens = batch * spec.tokens / cp
        scores = kind.attention_flops / 2 * batch / (tp * cp)
        flops = kind.flops * batch / (tp * cp) - scores
        forward = self._busy(flops, tokens * kept.traffic, tp)
        again = {"none": 0.0, "selective": tokens * kept.traffic / self.memory_rate, "full": forward}[checkpointing]
        again *= 2 if splits else 1  # once for the input's gradient, once for the weights'
        config, waits = spec.config, {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        repeated = 1.0 if checkpointing != "none" else 0.0
        through_tp = (c + (self.memory.storage if replicas else c)) / 2  # `mmm.traffic.formulas`: half of them are wide
        if tp > 1:
            size = tokens * config.dim * through_tp
            calls = spec.definition.costs.pairs(config) * (2 + repeated)
            if spec.plan.sequence:  # which is sharded between the matrices
                waits["tp"] = calls * self._gather_and_reduce(groups["tp"], size)
            else:
                waits["tp"] = calls * collective("all_reduce", groups["tp"], size, machine)
        if cp > 1:
            waits["cp"] = self._context(cp, ulysses, tp, tokens, scores, repeated)
        if ep > 1:
            size = tokens / tp * config.top_k * config.dim * c
            waits["ep"] = (4 + 2 * repeated) * collective("all_to_all", groups["ep"], size, machine)
        return Layer(forward, 2 * forward + again, **waits)

    def _gather_and_reduce(self, group: Group, size: float) -> float:
        """Seconds of an all-gather and a reduce-scatter: one is the other's backward."""
        calls = ("all_gather", "reduce_scatter")
        return sum(collective(call, group, size, self.machine) for call in calls)

    def _context(self, cp: int, ulysses: int, tp: int, tokens: float, scores: float, repeated: float) -> float:
        """Seconds that attention over cp waits in a layer: for all-to-alls of `ulysses` neighbours, and hops."""
        config, c, machine, ring, waits = self.spec.config, self.memory.compute, self.machine, cp // ulysses, 0.0
        heads = config.n_heads / tp
        kv_heads = heads_over_cp(config.n_kv_heads, tp, ulysses)
        kv = kv_heads * config.head_dim * tokens * c  # keys, or values; under Ulysses fewer heads of more tokens
        if ulysses > 1:
            group, sent = group_of(ulysses, tp, machine), 2 * heads * config.head_dim * tokens * c + 2 * kv
            waits = (2 + repeated) * collective("all_to_all", group, sent, machine, calls=2)
        if ring == 1:
            return waits
        hop = send(2 * kv, group_of(ring, tp * ulysses, machine), machine)
        hidden = machine.overlap * scores / ring / self.rate
        wide = max(4 / c, 1.0)
        # What each hop adds to the sums of the others, in float32: read, read the hop's, write.
        merged = 12 * heads * config.head_dim * tokens / self.memory_rate
        forward = (ring - 1) * (max(hop - hidden, 0.0) + merged)
        backward = ring * (max((1 + wide) * hop - 2 * hidden, 0.0) + merged)
        return waits + (1 + repeated) * forward + backward

    def _head(self, tp: int, cp: int, batch: float, chunks: int) -> tuple[float, float]:
        """Seconds of embedding, output and loss: compute, and what tp waits."""
        spec, c = self.spec, self.memory.compute
        tokens = batch * spec.tokens / cp
        flops = sum(kind.flops for kind in spec.kinds if kind.role in ("embedding", "head")) * batch / (tp * cp)
        if not spec.definition.language:
            return 3 * flops / self.rate, 0.0
        times = 4 if chunks > 1 else 3
        traffic = tokens * (spec.config.vocab_size / tp * (3 * c + 32) + 12 * c * spec.config.dim)
        size = tokens * spec.config.dim * c
        waits = 2 * self._gather_and_reduce(self.groups(Layout(tp=tp, dp_shard=1))["tp"], size)
        return times * flops / self.rate + traffic / self.memory_rate, waits

    def _work(self, trial: Trial) -> Work:
        """What a step takes without data parallelism. Of the layout pp, cp, tp and ep count."""
        machine, spec, layout = self.machine, self.spec, trial.layout
        schedule = trial.techniques.schedule
        layer = self.layer(
            layout.tp,
            layout.cp,
            layout.ep,
            trial.batch,
            trial.techniques.checkpointing,
            trial.ulysses,
            trial.unsharded,
            layout.pp > 1 and SCHEDULES[schedule].splits,
        )
        head, head_waits = self.head(layout.tp, layout.cp, trial.batch, trial.techniques.loss_chunks)
        slowest = (0.0, 0.0, 0.0, 0)
        for stage in trial.stages:
            layers = sum(count for number, count in stage.kinds if spec.kinds[number].role == "layer")
            compute = layers * (layer.forward + layer.backward) + (head if stage.has_head else 0.0)
            waits = layers * layer.tp + (head_waits if stage.has_head else 0.0)
            slowest = max(slowest, (compute + waits + layers * (layer.cp + layer.ep), compute, waits, layers))
        total, compute, waits, layers = slowest
        p2p = 0.0
        bubble = 0.0
        if layout.pp > 1:
            own = trial.stages[0].own
            boundary = self.memory.kept(layout.tp, trial.unsharded).boundary
            passed = boundary * trial.batch * spec.tokens / layout.cp
            pipeline = group_of(layout.pp, machine.ranks // layout.pp, machine)
            p2p = 2 * own * send(passed, pipeline, machine)
            bubble = bubble_of(schedule, layout.pp, trial.microbatches, own)
        exposed = {"tp": waits, "cp": layers * layer.cp, "ep": layers * layer.ep, "pp": p2p}
        forward = layers * layer.forward + head / 3
        return Work(
            seconds=trial.microbatches * (total + p2p) / (1 - bubble),
            bubble=bubble,
            compute=trial.microbatches * compute,
            forward=forward,
            backward=compute - forward,
            exposed={axis: trial.microbatches * seconds for axis, seconds in exposed.items() if seconds},
        )

    def step(self, trial: Trial) -> StepCost:
        """Seconds of a step."""
        machine, layout = self.machine, trial.layout
        work = self.work(replace(trial, layout=replace(layout, dp_replicate=1, dp_shard=layout.ep)))
        shard, replicate, local = self._data_parallel(trial, work)
        updated = 10 * self.memory.storage * local  # gradients are clipped; AdamW reads four tensors and writes three
        optimizer = updated / self.memory_rate
        offload = 0.0
        if trial.techniques.offload:
            gathers = 1 if layout.pp > 1 else 2 * trial.microbatches
            moved = self.memory.storage * local * (1 + gathers)
            offload = moved / (machine.host_link_bandwidth or machine.memory_bandwidth)
            optimizer = updated * machine.ranks_per_host / (machine.host_memory_bandwidth or self.memory_rate)
        exposed = {**work.exposed, "dp_shard": shard, "dp_replicate": replicate}
        seconds = work.seconds + shard + replicate + optimizer + offload
        if machine.cores:
            # Ranks that wait leave their core to others; the cores have the work of all to do.
            busy = seconds - work.seconds * work.bubble
            seconds = max(seconds, busy * machine.ranks_per_host / machine.cores)
        return StepCost(
            seconds=seconds,
            compute=work.compute,
            exposed={axis: wait for axis, wait in exposed.items() if wait > 0},
            bubble=work.bubble,
            optimizer=optimizer,
            offload=offload,
        )

    def _data_parallel(self, trial: Trial, work: Work) -> tuple[float, float, int]:
        """Seconds that dp_shard (with cp) and dp_replicate make a step wait, of the rank with most parameters; and the
        elements of these that it updates. They hide behind the compute of `work`."""
        machine, layout = self.machine, trial.layout
        groups = self.groups(layout)
        forward, backward = machine.overlap * work.forward, machine.overlap * work.backward
        sizes = max((self.memory.of(stage, trial) for stage in trial.stages), key=lambda of: of.local)
        storage, compute = self.memory.storage, self.memory.compute
        if trial.unsharded:
            group = groups["dp_replicate" if layout.dp_replicate > 1 else "fsdp"]
            size = float(sizes.local * storage)
            calls = sizes.tensors
            operation = "reduce_scatter" if trial.techniques.data_parallel == "zero2" else "all_reduce"
            updated = sizes.sharded
            if trial.techniques.data_parallel == "ddp":
                calls = max(1, round(size / 25e6))  # DDP's buckets
                updated = sizes.local
            reduce = collective(operation, group, size, machine, calls=calls)
            waits = max(reduce - backward, 0.1 * reduce) if layout.pp == 1 else reduce  # after all micro-batches
            if trial.techniques.data_parallel != "ddp":
                waits += collective("all_gather", group, size, machine, calls=calls)
            return (0.0, waits, sizes.sharded) if layout.dp_replicate > 1 else (waits, 0.0, updated)
        group, padded, units = groups["fsdp"], sizes.padded, sizes.units
        gather = collective("all_gather", group, padded * compute, machine, calls=units)
        reduce = collective("reduce_scatter", group, padded * storage, machine, calls=units)
        if group.size > 1:  # read and written once
            gather += 2 * padded * compute / self.memory_rate
            reduce += 2 * padded * storage / self.memory_rate
        replicate = collective("all_reduce", groups["dp_replicate"], sizes.sharded * storage, machine, calls=units)
        first = gather / max(units, 1)
        if layout.pp > 1:
            return max(gather - forward, first) + reduce, replicate, sizes.sharded
        part_again = {"auto": 1 - 1 / max(units, 1), "always": 1.0, "never": 0.0}
        again = part_again[trial.techniques.reshard_after_forward] * gather
        waits = trial.microbatches * (max(gather - forward, first) + max(again - backward, 0.0))
        last = max(again + reduce - backward, 0.1 * reduce) - max(again - backward, 0.0)
        left = max(backward - again - reduce, 0.0)
        return waits + max(last, 0.0), max(replicate - left, 0.1 * replicate), sizes.sharded
