"""The search: every layout that model, machine and batch allow, with the techniques that make it fit, by step time.

A layout is pp · dp_replicate · dp_shard · cp · tp, and ep. On each the search tries the data-parallel techniques that
go with it, every schedule, kind of checkpointing, number of micro-batches and of loss chunks, and offload where memory
is short. The rules are the package's own (`mmm.parallel`), so that a trainer accepts what the search finds. The fastest
choice that fits stands for its layout; the fastest layout stands for its kind (axes and data-parallel technique).

A layout is skipped if its compute, and what tp makes it wait, already take longer than the fastest layout of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.cp.styles import divisors, host_ulysses
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.parallel.pp.stages import balance_stages
from mmm.trainer.loss_chunks import chunks_for
from mmm_lab.planner.candidate import Candidate, SearchResult, answer_first, kind_of, rank_of
from mmm_lab.planner.cost import CostModel, bubble_of
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import peak_rate
from mmm_lab.planner.spec import ModelSpec
from mmm_lab.planner.trial import PlannedStage, Trial, distinct, full_model, stages_for
from mmm_launch.machines.machine import Machine

CHECKPOINTING = ("none", "selective", "full")
MOST_STAGES_PER_RANK = 4

# Stages of the pipeline ranks, and the fields of `Techniques` that go with them.
Pipelining = tuple[tuple[PlannedStage, ...], dict[str, Any]]


class Search:
    """Searches all layouts of a model on a machine.

    Args:
        global_batch: number of samples in a step.
        dtype: name of a precision.
        optimizer: a key of `mmm.optim.adamw.STATE`.
        fixed: sizes of axes and fields of `Techniques` that every layout has to have, by name.
    """

    def __init__(
        self,
        spec: ModelSpec,
        machine: Machine,
        global_batch: int,
        dtype: str,
        optimizer: str = "adamw",
        fixed: Mapping[str, object] | None = None,
    ) -> None:
        self.spec = spec
        self.machine = machine
        self.global_batch = global_batch
        self.dtype = dtype
        self.optimizer = optimizer
        self.fixed: dict[str, Any] = dict(fixed or {})
        self.memory = MemoryModel(spec, machine.device, dtype, optimizer)
        self.cost = CostModel(spec, machine, dtype, self.memory)
        # Methods with caches: layouts that differ only in their data-parallel axes ask for the same results.
        self.splits = cache(lambda stages: balance_stages(spec.costs, stages))
        self.stages = cache(self._stages)
        self.broken = cache(self._broken)
        self.choices = cache(self._choices)
        self.one_stage = (full_model(spec),)
        self.peak = peak_rate(machine, dtype)

    def _stages(self, schedule: str, pp: int, n_stages: int) -> tuple[PlannedStage, ...]:
        """Return the pipeline ranks, each with `n_stages` stages. Of ranks with equal parts only the first is kept."""
        splits = self.splits(pp * n_stages)
        return tuple(distinct(stages_for(self.spec, splits, schedule, pp)))

    def _broken(
        self,
        tp: int,
        cp: int,
        ep: int,
        ulysses: int,
    ) -> str:
        """The first rule of the model that these axes break; empty if they break none."""
        spec = self.spec
        layout = Layout(tp=tp, cp=cp, ep=ep, dp_shard=ep)
        # Some plans have no style for an axis at all, such as a CNN for cp.
        for axis, why in spec.plan.refused.items():
            if getattr(layout, axis, 1) > 1:
                return why
        if cp > 1 and spec.plan.space is not None:
            return "the search has no costs of a field's rows over cp: `mmm dry-run` tries such a layout"
        broken = spec.definition.rules(spec.config, layout, spec.seq_length, ulysses)
        return next(iter(broken.values()), "")

    def _ulysses(self, tp: int, cp: int) -> list[int]:
        """How many cp ranks may shard heads among them: one (a ring), all, or those of a host (usp)."""
        heads = getattr(self.spec.config, "n_heads", 0)
        if not heads:
            return [1]
        # Neighbours on one host exchange heads over its fast links.
        on_a_host = host_ulysses(cp, tp, heads, self.machine.ranks_per_host)
        # A dict drops what comes twice and keeps the order.
        return list(dict.fromkeys((1, cp, on_a_host)))

    def layouts(self, refused: dict[str, str]) -> Iterator[tuple[Layout, str]]:
        """Yield every layout that is possible with each of its data-parallel techniques.

        Args:
            refused: reasons by kind. This method adds the reason of every layout that is not possible, one for a kind.
        """
        spec = self.spec
        for tp in self._sizes("tp", self.machine.ranks):
            for cp in self._sizes("cp", self.machine.ranks // tp):
                ranks = self.machine.ranks // (tp * cp)
                # A rule may depend on how many ranks share heads, so a layout is out only if all choices break one.
                reasons = [self.broken(tp, cp, 1, ulysses) for ulysses in self._ulysses(tp, cp)]
                if all(reasons):
                    refused.setdefault(kind_of(Layout(tp=tp, cp=cp, dp_shard=ranks), "fsdp"), reasons[0])
                    continue
                for pp in self._sizes("pp", ranks):
                    shape = Layout(pp=pp, cp=cp, tp=tp, dp_shard=ranks // pp)
                    reason = ""
                    if pp > len(spec.sequence):
                        reason = f"pp {pp}: the model has {len(spec.sequence)} parts, and each pp rank needs one"
                    elif pp > 1 and not spec.plan.stages:
                        reason = f"pp {pp}: the model's plan has no pipeline stages"
                    if reason:
                        refused.setdefault(kind_of(shape, "fsdp"), reason)
                        continue
                    if self.global_batch % shape.dp:
                        reason = f"global batch {self.global_batch} does not divide over {shape.dp} data-parallel ranks"
                        for technique in ("fsdp", *self._unsharded(shape)):
                            refused.setdefault(kind_of(shape, technique), reason)
                        continue
                    yield from self._data_parallel(shape)

    def _wanted(self, **values: object) -> bool:
        """Whether axes and techniques may have these values."""
        return all(self.fixed.get(name, value) == value for name, value in values.items())

    def _sizes(self, axis: str, ranks: int) -> list[int]:
        """The sizes that an axis may have."""
        return [size for size in divisors(ranks) if self._wanted(**{axis: size})]

    def _unsharded(self, shape: Layout) -> tuple[str, ...]:
        """The techniques by which each rank has all parameters that pp, tp and ep leave it.

        With more axes than dp, zero2 is tried only if it was asked for: it needs as much memory as zero1 until the last
        micro-batch ends.
        """
        if shape.pp * shape.cp * shape.tp == 1:
            return UNSHARDED
        if self.fixed.get("data_parallel") == "zero2":
            return ("zero2",)
        return ("zero1",)

    def _data_parallel(self, shape: Layout) -> Iterator[tuple[Layout, str]]:
        """Yield the layout with every data-parallel technique that goes with it, and with every ep for its experts.

        Args:
            shape: a layout that has all of its data-parallel ranks on dp_shard.
        """
        dp = shape.dp_shard
        experts = getattr(self.spec.config, "n_experts", 0)
        # zero1 and zero2 need ranks to shard over; ddp on one rank is the model as it is.
        options: list[tuple[str, Layout]] = []
        for technique in self._unsharded(shape):
            if dp * shape.cp > 1 or technique == "ddp":
                options.append((technique, shape))
        for replicas in divisors(dp):
            sharded = replace(shape, dp_replicate=replicas, dp_shard=dp // replicas)
            if replicas == 1:
                options.append(("fsdp", sharded))
            elif sharded.dp_shard * sharded.cp > 1:
                options.append(("hsdp", sharded))
        for technique, layout in options:
            largest_ep = 1
            if experts and technique != "ddp":
                # ep divides dp_shard, and its ranks have equal numbers of experts, so that it divides both.
                largest_ep = math.gcd(experts, layout.dp_shard)
            for ep in divisors(largest_ep):
                sizes = {
                    "dp_replicate": layout.dp_replicate,
                    "dp_shard": layout.dp_shard,
                    "ep": ep,
                }
                if self._wanted(data_parallel=technique, **sizes):
                    yield replace(layout, ep=ep), technique

    def run(self) -> SearchResult:
        """Search all layouts, and return the best candidates and the reasons against the other kinds."""
        refused: dict[str, str] = {}
        # One candidate for each layout that fits, and the best candidate of each kind.
        best: list[Candidate] = []
        kinds: dict[str, Candidate] = {}
        layouts = list(self.layouts(refused))
        # Those that promise to be fast come first, so that slow ones of the same kind can be skipped.
        bounds = [self._lower_bound(layout) for layout, _ in layouts]
        for index in sorted(range(len(layouts)), key=bounds.__getitem__):
            layout, technique = layouts[index]
            kind = kind_of(layout, technique)
            # The best of this kind so far.
            known = kinds.get(kind)
            if known is not None and known.fits and bounds[index] > known.cost.seconds:
                continue
            candidate = self.best_choice(layout, technique)
            if candidate is None:
                refused.setdefault(kind, "no schedule, or no number of micro-batches, goes with the batch")
                continue
            if candidate.fits:
                best.append(candidate)
            if known is None or rank_of(candidate) < rank_of(known):
                kinds[kind] = candidate
        # A kind of which one layout is possible is not refused.
        for kind in kinds:
            refused.pop(kind, None)
        return SearchResult(
            answer_first(best),
            sorted(kinds.values(), key=rank_of),
            refused,
            len(layouts),
        )

    def _lower_bound(self, layout: Layout) -> float:
        """Seconds that no choice on a layout can go below.

        This counts the layers with the waiting for tp and cp, and the bubble of the schedule that has the smallest one.
        """
        pp = layout.pp
        local_batch = self.global_batch // layout.dp
        times = []
        for ulysses in self._ulysses(layout.tp, layout.cp):
            if not self.broken(layout.tp, layout.cp, 1, ulysses):
                layer = self.cost.layer(
                    layout.tp,
                    layout.cp,
                    1,
                    local_batch,
                    ulysses=ulysses,
                )
                times.append(sum(layer))
        n_stages = max(min(MOST_STAGES_PER_RANK, len(self.spec.sequence) // pp), 1)
        # As many micro-batches as samples make the smallest bubble. Schedules that do not split the backward pass have
        # the formula of GPipe with several stages on a rank.
        bubble = bubble_of("GPipe", pp, local_batch, n_stages)
        if local_batch >= pp:
            # The formula of the schedules that split it.
            bubble = min(bubble, (pp - 1) / (3 * local_batch * n_stages + pp - 1))
        return self.one_stage[0].layers * min(times) / pp / (1 - bubble)

    def best_choice(self, layout: Layout, technique: str) -> Candidate | None:
        """The fastest choice on a layout that fits.

        If none fits it is the choice that needs least memory. None if there is nothing to choose from.
        """
        # All data-parallel layouts of the same shape have the same choices, which are cached.
        shape = replace(layout, dp_replicate=1, dp_shard=layout.ep)
        smallest: Trial | None = None
        # Offload is slow, so it is tried only if nothing fits without it.
        for offload in (False, True):
            if offload and (technique in UNSHARDED or not self.spec.offloads or self.machine.device == "cpu"):
                continue
            if not self._wanted(offload=offload):
                continue
            best: Candidate | None = None
            smallest = None
            least_memory = math.inf
            choices = self.choices(shape, self.global_batch // layout.dp, technique, offload)
            for seconds, shape_trial in choices:
                # The choices come in order of these seconds, and data parallelism only adds to them.
                if best is not None and seconds >= best.cost.seconds:
                    break
                trial = replace(shape_trial, layout=layout)
                needed, _ = self.memory.largest(trial, self.machine.budget)
                if needed <= self.machine.budget:
                    candidate = self.evaluate(trial)
                    if best is None or rank_of(candidate) < rank_of(best):
                        best = candidate
                elif needed < least_memory:
                    smallest = trial
                    least_memory = needed
            if best is not None:
                return best
        if smallest is None:
            return None
        return self.evaluate(smallest)

    def _choices(
        self,
        shape: Layout,
        local_batch: int,
        technique: str,
        offload: bool,
    ) -> list[tuple[float, Trial]]:
        """The techniques to choose from on a layout, fastest first, with their seconds without data parallelism.

        Args:
            shape: the layout without its data-parallel axes.
            local_batch: number of samples in a step for one data-parallel coordinate.
        """
        choices: list[tuple[float, Trial]] = []
        # Without a list of blocks in its plan a model cannot be checkpointed.
        modes = CHECKPOINTING if self.spec.plan.checkpointed else CHECKPOINTING[:1]
        for ulysses in self._ulysses(shape.tp, shape.cp):
            if self.broken(shape.tp, shape.cp, shape.ep, ulysses):
                continue
            for mode in modes:
                common: dict[str, Any] = {
                    "data_parallel": technique,
                    "offload": offload,
                    "checkpointing": mode,
                }
                if ulysses == 1:
                    common["cp_style"] = "ring"
                elif ulysses == shape.cp:
                    common["cp_style"] = "ulysses"
                else:
                    common |= {"cp_style": "usp", "ulysses": ulysses}
                if not self._wanted(**common):
                    continue
                if shape.pp == 1:
                    pipelinings = self._without_pipeline(local_batch, technique)
                else:
                    pipelinings = self._pipelines(shape, local_batch, mode)
                for stages, fields in pipelinings:
                    techniques = Techniques(**common, **fields)
                    trial = self.chunked(Trial(shape, techniques, stages, local_batch))
                    choices.append((self.cost.work(trial).seconds, trial))
        # A choice that is slower than another, and needs no less memory, cannot be the answer. If this is so for one
        # split of the ranks over the data-parallel axes, it is so for all, and the choices are compared on only one.
        all_sharded = replace(shape, dp_shard=self.machine.ranks // (shape.pp * shape.cp * shape.tp))
        # From here on each has less memory than all before it.
        useful: list[tuple[float, Trial]] = []
        least = math.inf
        for seconds, trial in sorted(choices, key=itemgetter(0)):
            needed, _ = self.memory.largest(replace(trial, layout=all_sharded), least)
            if needed < least:
                useful.append((seconds, trial))
                least = needed
        return useful

    def _without_pipeline(self, local_batch: int, technique: str) -> Iterator[Pipelining]:
        """Yield numbers of micro-batches, each with FSDP freeing weights after forward and with FSDP keeping them."""
        for reshard in ("auto", "never"):
            if reshard == "never" and technique in UNSHARDED:
                continue
            for count in divisors(local_batch):
                fields = {"reshard_after_forward": reshard, "microbatches": count}
                if self._wanted(**fields):
                    yield self.one_stage, fields

    def _waits_for_host(self, shape: Layout, batch: int) -> bool:
        """Whether starting the kernels of a layer takes the host about as long as the device needs to run them.

        Half as many samples in a micro-batch then take almost as long.
        """
        layer = self.cost.layer(shape.tp, shape.cp, 1, batch)
        return layer.forward < 1.5 * self.machine.layer_overhead

    def _pipelines(self, shape: Layout, local_batch: int, mode: str) -> Iterator[Pipelining]:
        """Yield schedules with the numbers of stages on each rank and of micro-batches that are worth trying.

        Args:
            mode: kind of checkpointing.
        """
        for name, schedule in SCHEDULES.items():
            if not self._wanted(schedule=name):
                continue
            # Selective checkpointing and a split backward pass do not go together in PyTorch.
            if mode == "selective" and schedule.splits:
                continue
            # Some schedules need a minimum of micro-batches, or a multiple of pp.
            least, multiple = schedule.microbatches(shape.pp)
            counts = []
            for count in divisors(local_batch):
                if count >= least and count % multiple == 0 and self._wanted(microbatches=count):
                    counts.append(count)
            if not counts:
                continue
            # Many small micro-batches make the bubble small. Where the host cannot start kernels fast enough, larger
            # micro-batches are faster: then more numbers are tried.
            tried = 1
            if self._waits_for_host(shape, local_batch // counts[-1]):
                tried = 3
            for n_stages in range(schedule.min_stages, (schedule.max_stages or MOST_STAGES_PER_RANK) + 1):
                if shape.pp * n_stages > len(self.spec.sequence) or not self._wanted(stages_per_rank=n_stages):
                    continue
                stages = self.stages(name, shape.pp, n_stages)
                for count in reversed(counts[-tried:]):
                    yield (
                        stages,
                        {
                            "schedule": name,
                            "stages_per_rank": n_stages,
                            "microbatches": count,
                        },
                    )

    def chunked(self, trial: Trial) -> Trial:
        """The trial with as many chunks of the loss as the trainers would choose."""
        chunks = self.fixed.get("loss_chunks", 1)
        if "loss_chunks" not in self.fixed and self.spec.definition.language:
            tokens = self.spec.tokens // trial.layout.cp
            # The loss computes in float32 at least.
            element_size = 8 if self.dtype == "fp64" else 4
            vocabulary = -(-self.spec.config.vocab_size // trial.layout.tp)
            chunks = chunks_for(vocabulary * trial.batch * tokens * element_size, tokens)
        return replace(trial, techniques=replace(trial.techniques, loss_chunks=chunks))

    def evaluate(self, trial: Trial) -> Candidate:
        """Compute the memory and the step time of a trial."""
        spec = self.spec
        machine = self.machine
        needed, memory = self.memory.largest(trial)
        host_memory = self.memory.on_host(trial)
        # A machine file may not say how much memory its hosts have.
        fits_host = host_memory * machine.ranks_per_host <= (machine.host_memory or math.inf)
        cost = self.cost.step(trial)
        kind = kind_of(trial.layout, trial.techniques.data_parallel)
        if trial.techniques.offload:
            kind += "·offload"
        return Candidate(
            trial=trial,
            kind=kind,
            memory=memory,
            fits=needed <= machine.budget and fits_host,
            cost=cost,
            tokens_per_second=self.global_batch * spec.tokens / cost.seconds,
            mfu=self.global_batch * spec.flops / (cost.seconds * self.peak * machine.ranks),
            host_memory=host_memory,
        )
