"""How long a step takes, by arithmetic on a `Machine`.

::

    step = (micro-batches · slowest stage) / (1 - bubble) + gathering and reducing that nothing hides + optimizer
    a layer's forward = products / (peak · matmul_efficiency) + element-wise bytes / (memory_bandwidth · …)
    its backward      = twice that, and what checkpointing computes again
    a collective      = messages that follow each other · latency + bytes that a rank sends / bandwidth
    a unit of FSDP    = its collectives, and the copies out of the gathered buffer and into the reduced one

Tensor parallelism, Ulysses and the experts' all-to-all wait for each collective (see network.py). A ring of cp hides
behind a part of its attention (`Machine.overlap`), data parallelism behind the same part of the compute around it. The
bubble comes from `bubble_formula`. Where ranks outnumber the cores of a host (`Machine.cores`) they take turns: a step
takes as long as the cores need for what all ranks together compute and send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
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

DDP_BUCKET = 25e6  # bytes of gradients that DDP sums in one call


class Layer(NamedTuple):
    """Seconds of one layer and one micro-batch: compute of forward and backward, and what each axis makes it wait."""

    forward: float
    backward: float
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0


class StageTime(NamedTuple):
    """Seconds of one micro-batch on a stage.

    Attributes:
        total: compute and waiting.
        tp: what tensor parallelism makes it wait.
        layers: number of layers of the stage.
    """

    total: float
    compute: float
    tp: float
    layers: int


class Work(NamedTuple):
    """Seconds of a step without data parallelism, on the slowest stage.

    Attributes:
        seconds: of all micro-batches, with the bubble.
        bubble: fraction of the step that stages wait for each other.
        compute: of all micro-batches.
        forward, backward: compute of one micro-batch.
        exposed: what each axis makes the step wait.
    """

    seconds: float
    bubble: float
    compute: float
    forward: float
    backward: float
    exposed: dict[str, float]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step.

    Attributes:
        exposed: what each axis makes a rank wait.
        bubble: fraction of the step that stages wait for each other.
        offload: seconds that offloaded tensors travel between host and device.
    """

    seconds: float
    compute: float
    exposed: Mapping[str, float]
    bubble: float
    optimizer: float
    offload: float


def bubble_of(
    schedule: str,
    pp: int,
    microbatches: int,
    n_stages: int,
) -> float:
    """The fraction of a step that stages wait for each other.

    It comes from `bubble_formula`. Where that has no formula, because there are few micro-batches, the stages are taken
    to run in turn and not to split their backward pass.

    Args:
        n_stages: number of stages on each rank.
    """
    bubble = bubble_formula(schedule, pp, microbatches, n_stages)
    if bubble is not None:
        return bubble
    if microbatches >= pp:
        return (pp - 1) / (microbatches * n_stages + pp - 1)
    return 1 - microbatches * n_stages / (pp * n_stages + microbatches - 1)


class CostModel:
    """Predicts the step times of a model on a machine.

    Args:
        dtype: name of a precision.
        memory: of the same model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        machine: Machine,
        dtype: str,
        memory: MemoryModel,
    ) -> None:
        self.spec = spec
        self.machine = machine
        self.memory = memory
        self.rate = peak_rate(machine, dtype) * machine.matmul_efficiency
        self.memory_rate = machine.memory_bandwidth * machine.memory_efficiency
        # A search asks for the same few values of each again and again.
        self.work = cache(self._work)
        self.layer = cache(self._layer)
        self.head = cache(self._head)
        self.groups = cache(lambda layout: groups_of(layout, machine))

    def _busy(self, flops: float, traffic: float, tp: int) -> float:
        """Seconds of a layer's forward: its kernels, or if these are short, the time in which the host starts them."""
        seconds = flops / self.rate + traffic / self.memory_rate
        overhead = self.machine.layer_overhead
        if tp > 1:
            overhead += self.machine.tensor_overhead
        if self.machine.device == "cpu":
            # The thread that computes starts the kernels as well.
            return seconds + overhead
        return max(seconds, overhead)

    def _layer(
        self,
        tp: int,
        cp: int,
        ep: int,
        batch: float,
        checkpointing: str = "none",
        ulysses: int = 1,
        unsharded: bool = False,
        splits: bool = False,
    ) -> Layer:
        """Seconds of one layer and one micro-batch.

        Args:
            unsharded: whether every rank has all parameters that pp, tp and ep leave it.
            splits: whether the schedule computes the gradients of weights later than those of inputs.
        """
        spec = self.spec
        config = spec.config
        compute = self.memory.compute
        kind = next(kind for kind in spec.kinds if kind.role == "layer")
        groups = self.groups(Layout(dp_shard=ep, cp=cp, tp=tp, ep=ep))
        # Bytes for each token.
        activations = self.memory.kept(tp, unsharded)
        tokens = batch * spec.tokens / cp
        # A kernel of causal attention computes half of the scores.
        scores = kind.attention_flops / 2 * batch / (tp * cp)
        flops = kind.flops * batch / (tp * cp) - scores
        forward = self._busy(flops, tokens * activations.traffic, tp)
        again = 0.0
        if checkpointing == "selective":
            again = tokens * activations.traffic / self.memory_rate
        elif checkpointing == "full":
            again = forward
        if splits:
            # Once for the gradient of the input, once for those of the weights.
            again *= 2
        repeated = 0.0
        if checkpointing != "none":
            repeated = 1.0
        tp_wait = 0.0
        cp_wait = 0.0
        ep_wait = 0.0
        if tp > 1:
            # As `mmm.traffic.formulas` has it: half of what passes is the residual stream.
            residual = self.memory.storage if unsharded else compute
            size = tokens * config.dim * ((compute + residual) / 2)
            calls = spec.definition.costs.pairs(config) * (2 + repeated)
            if spec.plan.sequence:
                # The sequence is sharded between the matrix products.
                tp_wait = calls * self._gather_and_reduce(groups["tp"], size)
            else:
                tp_wait = calls * collective(
                    "all_reduce",
                    groups["tp"],
                    size,
                    self.machine,
                )
        if cp > 1:
            cp_wait = self._context(cp, ulysses, tp, tokens, scores, repeated)
        if ep > 1:
            size = tokens / tp * config.top_k * config.dim * compute
            ep_wait = (4 + 2 * repeated) * collective(
                "all_to_all",
                groups["ep"],
                size,
                self.machine,
            )
        return Layer(
            forward=forward,
            backward=2 * forward + again,
            tp=tp_wait,
            cp=cp_wait,
            ep=ep_wait,
        )

    def _gather_and_reduce(self, group: Group, size: float) -> float:
        """Seconds of an all-gather and a reduce-scatter. Each is the backward of the other."""
        gather = collective("all_gather", group, size, self.machine)
        return gather + collective("reduce_scatter", group, size, self.machine)

    def _context(
        self,
        cp: int,
        ulysses: int,
        tp: int,
        tokens: float,
        scores: float,
        repeated: float,
    ) -> float:
        """Seconds that attention over cp waits in one layer: for all-to-alls and for hops of the ring.

        Args:
            ulysses: number of neighbours that exchange heads for tokens by an all-to-all.
            tokens: number of tokens of a micro-batch on this rank.
            scores: FLOPs of the attention's scores on this rank.
            repeated: how often checkpointing computes the forward pass again.
        """
        config = self.spec.config
        machine = self.machine
        compute = self.memory.compute
        ring = cp // ulysses
        heads = config.n_heads / tp
        kv_heads = heads_over_cp(config.n_kv_heads, tp, ulysses)
        # Bytes of the keys, or of the values. Under Ulysses a rank has fewer heads of more tokens: as many bytes.
        kv = kv_heads * config.head_dim * tokens * compute
        wait = 0.0
        if ulysses > 1:
            neighbours = group_of(ulysses, tp, machine)
            sent = 2 * heads * config.head_dim * tokens * compute + 2 * kv
            wait = (2 + repeated) * collective(
                "all_to_all",
                neighbours,
                sent,
                machine,
                calls=2,
            )
        if ring == 1:
            return wait
        hop = send(2 * kv, group_of(ring, tp * ulysses, machine), machine)
        hidden = machine.overlap * scores / ring / self.rate
        # Backward also passes on the gradients of keys and values, in float32 at least.
        gradients = max(4 / compute, 1.0)
        # Each hop's result is added to the sums in float32: read the sums, read the result, write the sums.
        merged = 12 * heads * config.head_dim * tokens / self.memory_rate
        forward = (ring - 1) * (max(hop - hidden, 0.0) + merged)
        backward = ring * (max((1 + gradients) * hop - 2 * hidden, 0.0) + merged)
        return wait + (1 + repeated) * forward + backward

    def _head(
        self,
        tp: int,
        cp: int,
        batch: float,
        chunks: int,
    ) -> tuple[float, float]:
        """Seconds of embedding, output and loss: compute, and what tp makes them wait."""
        spec = self.spec
        compute = self.memory.compute
        tokens = batch * spec.tokens / cp
        flops = sum(kind.flops for kind in spec.kinds if kind.role in ("embedding", "head")) * batch / (tp * cp)
        if not spec.definition.language:
            return 3 * flops / self.rate, 0.0
        # In chunks the loss computes the logits twice.
        passes = 3
        if chunks > 1:
            passes = 4
        traffic = tokens * (spec.config.vocab_size / tp * (3 * compute + 32) + 12 * compute * spec.config.dim)
        size = tokens * spec.config.dim * compute
        wait = 2 * self._gather_and_reduce(self.groups(Layout(tp=tp, dp_shard=1))["tp"], size)
        return passes * flops / self.rate + traffic / self.memory_rate, wait

    def _work(self, trial: Trial) -> Work:
        """What a step takes without data parallelism. Only pp, cp, tp and ep of the layout count."""
        spec = self.spec
        layout = trial.layout
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
        head, head_wait = self.head(
            layout.tp,
            layout.cp,
            trial.batch,
            trial.techniques.loss_chunks,
        )
        slowest = StageTime(0.0, 0.0, 0.0, 0)
        for stage in trial.stages:
            compute = stage.layers * (layer.forward + layer.backward)
            tp_wait = stage.layers * layer.tp
            if stage.has_head:
                compute += head
                tp_wait += head_wait
            total = compute + tp_wait + stage.layers * (layer.cp + layer.ep)
            slowest = max(slowest, StageTime(total, compute, tp_wait, stage.layers))
        messages = 0.0
        bubble = 0.0
        if layout.pp > 1:
            n_stages = trial.stages[0].n_stages
            boundary = self.memory.kept(layout.tp, trial.unsharded).boundary
            passed = boundary * trial.batch * spec.tokens / layout.cp
            # pp is the outermost axis: neighbours are as many ranks apart as a stage has.
            pipeline = group_of(layout.pp, self.machine.ranks // layout.pp, self.machine)
            messages = 2 * n_stages * send(passed, pipeline, self.machine)
            bubble = bubble_of(schedule, layout.pp, trial.microbatches, n_stages)
        # Ranks wait for the slowest stage.
        layers = slowest.layers
        exposed = {
            "tp": slowest.tp,
            "cp": layers * layer.cp,
            "ep": layers * layer.ep,
            "pp": messages,
        }
        forward = layers * layer.forward + head / 3
        return Work(
            seconds=trial.microbatches * (slowest.total + messages) / (1 - bubble),
            bubble=bubble,
            compute=trial.microbatches * slowest.compute,
            forward=forward,
            backward=slowest.compute - forward,
            exposed={axis: trial.microbatches * seconds for axis, seconds in exposed.items() if seconds},
        )

    def step(self, trial: Trial) -> StepCost:
        """Seconds of a step."""
        machine = self.machine
        layout = trial.layout
        # `work` is the same for all data-parallel layouts, so that one entry of its cache serves them all.
        work = self.work(replace(trial, layout=replace(layout, dp_replicate=1, dp_shard=layout.ep)))
        shard_wait, replicate_wait, updated = self._data_parallel(trial, work)
        # Gradients are clipped; AdamW reads four tensors and writes three.
        traffic = 10 * self.memory.storage * updated
        optimizer = traffic / self.memory_rate
        offload = 0.0
        if trial.techniques.offload:
            gathers = 2 * trial.microbatches
            if layout.pp > 1:
                gathers = 1
            moved = self.memory.storage * updated * (1 + gathers)
            offload = moved / (machine.host_link_bandwidth or machine.memory_bandwidth)
            optimizer = traffic * machine.ranks_per_host / (machine.host_memory_bandwidth or self.memory_rate)
        exposed = {
            **work.exposed,
            "dp_shard": shard_wait,
            "dp_replicate": replicate_wait,
        }
        seconds = work.seconds + shard_wait + replicate_wait + optimizer + offload
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
        """Seconds that a step waits for data parallelism, which hides behind the compute of `work`.

        Returns:
            Seconds for dp_shard (with cp); seconds for dp_replicate; elements that a rank's optimizer updates.
        """
        machine = self.machine
        layout = trial.layout
        storage = self.memory.storage
        groups = self.groups(layout)
        forward = machine.overlap * work.forward
        backward = machine.overlap * work.backward
        # Stages have different numbers of parameters: the largest decides.
        sizes = max((self.memory.of(stage, trial) for stage in trial.stages), key=lambda sizes: sizes.local)
        if trial.unsharded:
            # ddp, zero1 and zero2: gradients are summed once, after the last micro-batch.
            technique = trial.techniques.data_parallel
            group = groups["dp_replicate" if layout.dp_replicate > 1 else "fsdp"]
            size = float(sizes.local * storage)
            calls = sizes.tensors
            updated = sizes.sharded
            if technique == "ddp":
                calls = max(1, round(size / DDP_BUCKET))
                updated = sizes.local
            operation = "all_reduce"
            if technique == "zero2":
                operation = "reduce_scatter"
            wait = collective(operation, group, size, machine, calls=calls)
            if layout.pp == 1:
                # Some of it stays visible: the last bucket is ready only when backward is over. A pipeline sums
                # gradients after all micro-batches, behind nothing.
                wait = max(wait - backward, 0.1 * wait)
            if technique != "ddp":
                wait += collective("all_gather", group, size, machine, calls=calls)
            if layout.dp_replicate > 1:
                return 0.0, wait, updated
            return wait, 0.0, updated
        units = sizes.units
        gathered = sizes.padded * self.memory.compute
        reduced = sizes.padded * storage
        gather = collective(
            "all_gather",
            groups["fsdp"],
            gathered,
            machine,
            calls=units,
        )
        reduce = collective(
            "reduce_scatter",
            groups["fsdp"],
            reduced,
            machine,
            calls=units,
        )
        if groups["fsdp"].size > 1:
            # The copies out of the gathered buffer and into the reduced one: read once, written once.
            gather += 2 * gathered / self.memory_rate
            reduce += 2 * reduced / self.memory_rate
        replicate = collective(
            "all_reduce",
            groups["dp_replicate"],
            sizes.sharded * storage,
            machine,
            calls=units,
        )
        # Nothing hides the gathering of the first unit.
        first = gather / max(units, 1)
        if layout.pp > 1:
            return max(gather - forward, first) + reduce, replicate, sizes.sharded
        # The fraction of the units that backward gathers again; by default all but the last.
        fraction = {
            "auto": 1 - 1 / max(units, 1),
            "always": 1.0,
            "never": 0.0,
        }
        again = fraction[trial.techniques.reshard_after_forward] * gather
        again_wait = max(again - backward, 0.0)
        wait = trial.microbatches * (max(gather - forward, first) + again_wait)
        # Gradients are reduced in the backward pass of the last micro-batch only.
        reduce_wait = max(again + reduce - backward, 0.1 * reduce) - again_wait
        hidden = max(backward - again - reduce, 0.0)
        return wait + max(reduce_wait, 0.0), max(replicate - hidden, 0.1 * replicate), sizes.sharded
