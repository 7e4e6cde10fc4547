"""How long a step takes, by arithmetic on a `Machine`.

::

    a step            = micro-batches · slowest stage / (1 - bubble) + exposed data parallelism + optimizer + offload
    a layer's forward = FLOPs / (peak · matmul_efficiency) + element-wise bytes / (memory_bandwidth · memory_efficiency)
    its backward      = twice that, and what checkpointing recomputes
    a collective      = number of successive messages · latency + bytes that a rank sends / bandwidth
    a unit of FSDP    = its collectives, and the copies out of the gathered buffer and into the reduced one

Communication is exposed if ranks wait for it, and hidden if they compute in the meantime. All collectives of tensor
parallelism, Ulysses and the experts are exposed (see network.py). A ring of cp is hidden behind its attention, and data
parallelism behind forward and backward; both only up to a fraction of the compute, `Machine.overlap`. The bubble comes
from `bubble_formula`. Where ranks outnumber the cores of a host (`Machine.cores`) they take turns: a step takes as long
as the cores need for what all ranks together compute and send.
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

# Bytes of gradients that DDP sums in one call.
DDP_BUCKET = 25e6


class Layer(NamedTuple):
    """Seconds of one layer and one micro-batch.

    Attributes:
        forward: compute of the forward pass.
        backward: compute of the backward pass, with what checkpointing recomputes.
        tp, cp, ep: waiting for the communication of this axis.
    """

    forward: float
    backward: float
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0


class StageTime(NamedTuple):
    """Seconds of one micro-batch on a stage.

    Attributes:
        total: compute and waiting together.
        compute: compute of forward and backward.
        tp: waiting for tensor parallelism.
        layers: number of layers of the stage.
    """

    total: float
    compute: float
    tp: float
    layers: int


class Work(NamedTuple):
    """Seconds of a step without data parallelism, on the slowest stage.

    Attributes:
        seconds: seconds of all micro-batches, with the bubble.
        bubble: fraction of the step that stages wait for each other.
        compute: seconds of compute for all micro-batches.
        forward, backward: seconds of compute for one micro-batch.
        exposed: seconds that the step waits for each axis, by its name.
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
        seconds: seconds of the whole step.
        compute: seconds of compute on the slowest stage.
        exposed: seconds that the step waits for each axis, by its name.
        bubble: fraction of the step that stages wait for each other.
        optimizer: seconds of the optimizer's update.
        offload: seconds in which offloaded tensors move between host and device.
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

    It comes from `bubble_formula`. With too few micro-batches there is no formula. This function then assumes that the
    schedule does not split the backward pass, and that micro-batches pass the stages one after another.

    Args:
        n_stages: number of stages on each rank.
    """
    bubble = bubble_formula(schedule, pp, microbatches, n_stages)
    if bubble is not None:
        return bubble
    if microbatches >= pp:
        return (pp - 1) / (microbatches * n_stages + pp - 1)
    # In units of one stage and one micro-batch: work of a rank, divided by the length of the step. The last micro-batch
    # starts microbatches - 1 units after the first, and then passes all pp · n_stages stages.
    return 1 - microbatches * n_stages / (pp * n_stages + microbatches - 1)


class CostModel:
    """Predicts the step times of a model on a machine.

    Args:
        dtype: name of a precision.
        memory: the `MemoryModel` of the same model, which knows what a rank holds.
    """

    def __init__(self, spec: ModelSpec, machine: Machine, dtype: str, memory: MemoryModel) -> None:
        self.spec = spec
        self.machine = machine
        self.memory = memory
        # FLOP/s and bytes/s that kernels reach.
        self.rate = peak_rate(machine, dtype) * machine.matmul_efficiency
        self.memory_rate = machine.memory_bandwidth * machine.memory_efficiency
        # A search calls these many times with the same few arguments. Each model has its own caches.
        self.work = cache(self._work)
        self.layer = cache(self._layer)
        self.head = cache(self._head)
        self.groups = cache(lambda layout: groups_of(layout, machine))

    def _layer_forward(self, flops: float, traffic: float, tp: int) -> float:
        """Seconds of a layer's forward: those of its kernels, or of the host that starts them, if it is slower.

        Args:
            traffic: bytes that element-wise kernels read and write.
        """
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
        forward = self._layer_forward(flops, tokens * activations.traffic, tp)
        recompute = 0.0
        if checkpointing == "selective":
            # Outputs of matrix products and of fused attention are kept; only element-wise kernels run again.
            recompute = tokens * activations.traffic / self.memory_rate
        elif checkpointing == "full":
            recompute = forward
        if splits:
            # Each half of a split backward recomputes the forward for itself.
            recompute *= 2
        # Number of times that the collectives of forward are repeated in backward.
        repeated = 0.0
        if checkpointing != "none":
            repeated = 1.0
        tp_wait = 0.0
        cp_wait = 0.0
        ep_wait = 0.0
        if tp > 1:
            # Of the bytes, half is in the dtype of the residual stream and half in that of compute, as in the models'
            # `Costs.sent_over_tp`.
            residual = self.memory.storage if unsharded else compute
            size = tokens * config.dim * ((compute + residual) / 2)
            # For each pair of matrices: forward, backward, and forward again.
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
            # All-to-alls to the experts and back, in forward and in backward.
            ep_wait = (4 + 2 * repeated) * collective(
                "all_to_all",
                groups["ep"],
                size,
                self.machine,
            )
        return Layer(
            forward=forward,
            backward=2 * forward + recompute,
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
            repeated: number of times that checkpointing repeats the forward pass.
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
            # Two all-to-alls: one for queries, keys and values before attention, one for its output. The output has the
            # size of the queries.
            sent = 2 * heads * config.head_dim * tokens * compute + 2 * kv
            # Forward, backward, and forward again.
            wait = (2 + repeated) * collective(
                "all_to_all",
                neighbours,
                sent,
                machine,
                calls=2,
            )
        if ring == 1:
            return wait
        # A message of the ring has keys and values.
        hop = send(2 * kv, group_of(ring, tp * ulysses, machine), machine)
        hidden = machine.overlap * scores / ring / self.rate
        # Backward also passes on the gradients of keys and values, in float32 at least: so many times their bytes.
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
        # A forward, and a backward that is twice as long. In chunks the loss computes the logits once more.
        passes = 3
        if chunks > 1:
            passes = 4
        # Memory traffic of a logit. In the dtype of compute: the matmul writes it, the cast to float32 reads it, and
        # the cast of its gradient writes that. In float32, 4 bytes each: the cast writes it; log_softmax reads it and
        # writes its result; the loss writes a gradient; the backward of log_softmax reads result and gradient and
        # writes another gradient, which the cast reads.
        per_logit = 3 * compute + 8 * 4
        # Memory traffic of an element of the hidden state: embedding, last norm and the matmul's input, forward and
        # backward, read or write it about 12 times.
        per_element = 12 * compute
        traffic = tokens * (spec.config.vocab_size / tp * per_logit + per_element * spec.config.dim)
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
        # Tuples compare by their first entry, the total.
        slowest = StageTime(0.0, 0.0, 0.0, 0)
        for stage in trial.stages:
            compute = stage.layers * (layer.forward + layer.backward)
            tp_wait = stage.layers * layer.tp
            if stage.has_head:
                compute += head
                tp_wait += head_wait
            total = compute + tp_wait + stage.layers * (layer.cp + layer.ep)
            slowest = max(slowest, StageTime(total, compute, tp_wait, stage.layers))
        message_time = 0.0
        bubble = 0.0
        if layout.pp > 1:
            n_stages = trial.stages[0].n_stages
            boundary = self.memory.kept(layout.tp, trial.unsharded).boundary
            passed = boundary * trial.batch * spec.tokens / layout.cp
            # pp is the outermost axis: neighbours are as many ranks apart as a stage has.
            pipeline = group_of(layout.pp, self.machine.ranks // layout.pp, self.machine)
            # Activations go forward and gradients back.
            message_time = 2 * n_stages * send(passed, pipeline, self.machine)
            bubble = bubble_of(schedule, layout.pp, trial.microbatches, n_stages)
        # Ranks wait for the slowest stage.
        layers = slowest.layers
        exposed = {
            "tp": slowest.tp,
            "cp": layers * layer.cp,
            "ep": layers * layer.ep,
            "pp": message_time,
        }
        # A third of the head's time is its forward.
        forward = layers * layer.forward + head / 3
        return Work(
            seconds=trial.microbatches * (slowest.total + message_time) / (1 - bubble),
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
        # AdamW reads four tensors and writes three. Clipping reads the gradients twice and writes them: 10 in all.
        traffic = 10 * self.memory.storage * updated
        optimizer = traffic / self.memory_rate
        offload = 0.0
        if trial.techniques.offload:
            # FSDP copies a shard to the device whenever it gathers it, and its gradient to the host once. A pipeline
            # gathers once a step; otherwise each micro-batch gathers in forward and in backward.
            gathers = 2 * trial.microbatches
            if layout.pp > 1:
                gathers = 1
            moved = self.memory.storage * updated * (1 + gathers)
            offload = moved / (machine.host_link_bandwidth or machine.memory_bandwidth)
            # The update runs on the host, whose memory bandwidth the ranks share.
            optimizer = traffic * machine.ranks_per_host / (machine.host_memory_bandwidth or self.memory_rate)
        exposed = {
            **work.exposed,
            "dp_shard": shard_wait,
            "dp_replicate": replicate_wait,
        }
        seconds = work.seconds + shard_wait + replicate_wait + optimizer + offload
        if machine.cores:
            # A rank that waits for another stage leaves its core to other ranks. The cores have to do the work of all
            # ranks of the host.
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
        # Seconds of communication that forward and backward of one micro-batch can hide.
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
                # At least a tenth stays exposed: the last bucket is ready only when backward is over. A pipeline sums
                # gradients after all micro-batches, when nothing can hide it.
                wait = max(wait - backward, 0.1 * wait)
            if technique != "ddp":
                # ZeRO gathers the updated parameters.
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
        # A pipeline gathers once, and reduces after all micro-batches.
        if layout.pp > 1:
            return max(gather - forward, first) + reduce, replicate, sizes.sharded
        # The fraction of the units that backward gathers again; by default all but the last.
        fraction = {"auto": 1 - 1 / max(units, 1), "always": 1.0, "never": 0.0}
        regather = fraction[trial.techniques.reshard_after_forward] * gather
        regather_wait = max(regather - backward, 0.0)
        wait = trial.microbatches * (max(gather - forward, first) + regather_wait)
        # The backward of the last micro-batch hides three things in this order: gathering again, reducing over
        # dp_shard, and summing over dp_replicate. Only this backward reduces.
        reduce_wait = max(regather + reduce - backward, 0.1 * reduce) - regather_wait
        backward_left = max(backward - regather - reduce, 0.0)
        return wait + max(reduce_wait, 0.0), max(replicate - backward_left, 0.1 * replicate), sizes.sharded
