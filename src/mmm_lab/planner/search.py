"""The search: every layout that model, machine and batch allow, with the techniques that make it fit, by step time.

Layouts are pp · dp_replicate · dp_shard · cp · tp, and ep; on each the data-parallel techniques that go with it, every
schedule, checkpointing, micro-batches, chunks of the loss, and where memory is short offload. The rules are the
package's own (`mmm.parallel`), so that a trainer takes what is found here. Of one layout the fastest choice that fits
counts; of one kind (axes and data-parallel technique) its fastest layout.

A layout is passed over where even its compute alone, and what tp makes it wait, takes longer than the fastest of its
kind does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.cp.styles import host_ulysses
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.parallel.pp.stages import balance_stages
from mmm_lab.planner.candidate import Candidate, Found, answer_first, divisors, is_better, kind_of, rank_of
from mmm_lab.planner.cost import CostModel, bubble_of
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import peak_rate
from mmm_lab.planner.spec import ModelSpec
from mmm_lab.planner.trial import PlannedStage, Trial, distinct, full_model, stages_for
from mmm_launch.machines.machine import Machine

CHECKPOINTING = ("none", "selective", "full")
CHUNK_BYTES = 250_000_000  # of the logits of a chunk, as the trainers choose it
MOST_STAGES_PER_RANK = 4


class Search:
    """All layouts of a model on a machine.

    Args:
        global_batch: samples of a step. dtype: name of a precision. optimizer: a key of `mmm_lab.planner.memory.STATE`.
        fixed: axis → size, or field of `Techniques` → value, that the layouts have to have.
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
        self.spec, self.machine, self.global_batch, self.dtype = spec, machine, global_batch, dtype
        self.optimizer, self.fixed = optimizer, dict(fixed or {})
        self.memory = MemoryModel(spec, machine.device, dtype, optimizer)
        self.cost = CostModel(spec, machine, dtype, self.memory)
        self.splits = lru_cache(maxsize=None)(lambda stages: balance_stages(spec.costs, stages))
        self.stages = lru_cache(maxsize=None)(self._stages)
        self.broken = lru_cache(maxsize=None)(self._broken)
        self.choices = lru_cache(maxsize=None)(self._choices)
        self.one_stage = (full_model(spec),)
        self.peak = peak_rate(machine, dtype)

    def _stages(self, schedule: str, pp: int, own: int) -> tuple[PlannedStage, ...]:
        return tuple(distinct(stages_for(self.spec, self.splits(pp * own), schedule, pp)))

    def _broken(self, tp: int, cp: int, ep: int, ulysses: int) -> str:
        """The first rule of the model that such axes break; "" for none."""
        spec, layout = self.spec, Layout(tp=tp, cp=cp, ep=ep, dp_shard=ep)
        for axis, why in spec.plan.refused.items():
            if getattr(layout, axis, 1) > 1:
                return why
        broken = spec.definition.rules(spec.config, layout, spec.seq_length, ulysses)
        return next(iter(broken.values()), "")

    def _ulysses(self, tp: int, cp: int) -> list[int]:
        """Ranks of cp that may shard heads among them: one (a ring), all, and where these differ a host's (usp)."""
        if not (heads := getattr(self.spec.config, "n_heads", 0)):
            return [1]
        return list(dict.fromkeys((1, cp, host_ulysses(cp, tp, heads, self.machine.ranks_per_host))))

    def layouts(self, refused: dict[str, str]) -> Iterator[tuple[Layout, str]]:
        """Layouts with a data-parallel technique. refused: kinds are added, with why one of its layouts does not go."""
        ranks, spec = self.machine.ranks, self.spec
        for tp in self._sizes("tp", ranks):
            for cp in self._sizes("cp", ranks // tp):
                why = [self.broken(tp, cp, 1, ulysses) for ulysses in self._ulysses(tp, cp)]
                if all(why):
                    refused.setdefault(kind_of(Layout(tp=tp, cp=cp, dp_shard=ranks // (tp * cp)), "fsdp"), why[0])
                    continue
                for pp in self._sizes("pp", ranks // (tp * cp)):
                    shape = Layout(pp=pp, cp=cp, tp=tp, dp_shard=ranks // (tp * cp * pp))
                    if pp > len(spec.sequence) or (pp > 1 and not spec.plan.stages):
                        text = f"the model has {len(spec.sequence)} parts, fewer than pp {pp}"
                        refused.setdefault(kind_of(shape, "fsdp"), text)
                        continue
                    if self.global_batch % shape.dp:
                        text = f"global batch {self.global_batch} does not divide over {shape.dp} data-parallel ranks"
                        for technique in ("fsdp", *self._unsharded(shape)):
                            refused.setdefault(kind_of(shape, technique), text)
                        continue
                    yield from self._data_parallel(shape)

    def _wanted(self, **values: object) -> bool:
        """Whether axes and techniques may have these values."""
        return all(self.fixed.get(name, value) == value for name, value in values.items())

    def _sizes(self, axis: str, ranks: int) -> list[int]:
        """The sizes that an axis may have."""
        return [size for size in divisors(ranks) if self._wanted(**{axis: size})]

    def _unsharded(self, shape: Layout) -> tuple[str, ...]:
        """Techniques by which each rank has all parameters that the axes of a layout leave it. With more axes than dp
        zero2 is left out where it was not asked for: it needs the memory of zero1 until the last micro-batch ends."""
        if shape.pp * shape.cp * shape.tp == 1:
            return UNSHARDED
        return ("zero2",) if self.fixed.get("data_parallel") == "zero2" else ("zero1",)

    def _data_parallel(self, shape: Layout) -> Iterator[tuple[Layout, str]]:
        """The techniques on a layout whose data-parallel ranks are all on dp_shard, and with experts each ep."""
        dp, experts = shape.dp_shard, getattr(self.spec.config, "n_experts", 0)
        unsharded = [name for name in self._unsharded(shape) if dp * shape.cp > 1 or name == "ddp"]
        options = [(technique, shape) for technique in unsharded]
        for replicas in divisors(dp):
            sharded = replace(shape, dp_replicate=replicas, dp_shard=dp // replicas)
            if replicas == 1:
                options.append(("fsdp", sharded))
            elif sharded.dp_shard * sharded.cp > 1:
                options.append(("hsdp", sharded))
        for technique, layout in options:
            shared = math.gcd(experts, layout.dp_shard) if experts and technique != "ddp" else 1
            for ep in divisors(shared):
                sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "ep": ep}
                if self._wanted(data_parallel=technique, **sizes):
                    yield replace(layout, ep=ep), technique

    def run(self) -> Found:
        """Look at all of them."""
        refused: dict[str, str] = {}
        best: list[Candidate] = []
        kinds: dict[str, Candidate] = {}
        looked_at = 0
        everything = sorted(
            (self._at_least(layout), number, layout, technique)
            for number, (layout, technique) in (enumerate(self.layouts(refused)))
        )
        for least, _, layout, technique in everything:
            looked_at += 1
            kind = kind_of(layout, technique)
            known = kinds.get(kind)
            if known is not None and known.fits and least > known.cost.seconds:
                continue
            found = self.best_choice(layout, technique)
            if found is None:
                refused.setdefault(kind, "no schedule, or no number of micro-batches, goes with the batch")
                continue
            if found.fits:
                best.append(found)
            if known is None or is_better(found, known):
                kinds[kind] = found
        for kind in kinds:
            refused.pop(kind, None)
        return Found(answer_first(best), sorted(kinds.values(), key=rank_of), refused, looked_at)

    def _at_least(self, layout: Layout) -> float:
        """Seconds that no choice on a layout can go below: its layers, what tp and cp make them wait, and the bubble of
        the schedule that has least."""
        batch, pp = self.global_batch // layout.dp, layout.pp
        sizes = [n for n in self._ulysses(layout.tp, layout.cp) if not self.broken(layout.tp, layout.cp, 1, n)]
        layers = sum(1 for kind in self.spec.sequence if self.spec.kinds[kind].role == "layer")
        own = max(min(MOST_STAGES_PER_RANK, len(self.spec.sequence) // pp), 1)
        bubble = (pp - 1) / (3 * batch * own + pp - 1) if batch >= pp else bubble_of("GPipe", pp, batch, own)
        times = (self.cost.layer(layout.tp, layout.cp, 1, batch, ulysses=n) for n in sizes)
        return layers * min(time.total for time in times) / pp / (1 - min(bubble, bubble_of("GPipe", pp, batch, own)))

    def best_choice(self, layout: Layout, technique: str) -> Candidate | None:
        """The fastest choice on a layout that fits; where none does, that which needs least. None where none goes."""
        shape = replace(layout, dp_replicate=1, dp_shard=layout.ep)
        can_offload = technique not in UNSHARDED and self.spec.offloads and self.machine.device != "cpu"
        least: tuple[float, Trial] | None = None
        for offload in (False, True) if can_offload else (False,):
            if not self._wanted(offload=offload):
                continue
            best: Candidate | None = None
            least = None
            for seconds, on_shape in self.choices(shape, self.global_batch // layout.dp, technique, offload):
                if best is not None and seconds >= best.cost.seconds:
                    break
                trial = replace(on_shape, layout=layout)
                needed, _ = self.memory.largest(trial, self.machine.budget)
                if needed > self.machine.budget:
                    if least is None or needed < least[0]:
                        least = needed, trial
                    continue
                candidate = self.evaluate(trial)
                if best is None or is_better(candidate, best):
                    best = candidate
            if best is not None:
                return best
        return None if least is None else self.evaluate(least[1])

    def _choices(self, shape: Layout, local: int, technique: str, offload: bool) -> list[tuple[float, Trial]]:
        """What there is to choose on a layout, with its seconds but for what data parallelism makes it wait, fastest
        first.

        Args:
            shape: without its data-parallel axes. local: samples of a step, of a data-parallel coordinate.
        """
        choices: list[tuple[float, Trial]] = []
        modes = CHECKPOINTING if self.spec.plan.checkpointed else CHECKPOINTING[:1]
        for ulysses in self._ulysses(shape.tp, shape.cp):
            if self.broken(shape.tp, shape.cp, shape.ep, ulysses):
                continue
            style = {1: "ring", shape.cp: "ulysses"}.get(ulysses, "usp") if shape.cp > 1 else "ring"
            for mode in modes:
                common = {"data_parallel": technique, "cp_style": style, "offload": offload, "checkpointing": mode}
                common |= {"ulysses": ulysses} if style == "usp" else {}
                if not self._wanted(**common):
                    continue
                pick = self._without_pipeline if shape.pp == 1 else self._pipelines
                for stages, more in pick(shape, local, mode, technique):
                    techniques = Techniques(**common, **more)  # type: ignore[arg-type]
                    trial = Trial(shape, techniques, stages, local)
                    trial = replace(trial, techniques=self.chunked(shape, techniques, trial.batch))
                    choices.append((self.cost.work(trial).seconds, trial))
        # Of those that are no faster, and need no less, whatever the data-parallel axes are, none can be the answer.
        all_sharded = replace(shape, dp_shard=self.machine.ranks // (shape.pp * shape.cp * shape.tp))
        useful: list[tuple[float, Trial]] = []
        least = math.inf
        for seconds, trial in sorted(choices, key=itemgetter(0)):
            most, _ = self.memory.largest(replace(trial, layout=all_sharded), least)
            if most < least:
                useful.append((seconds, trial))
                least = most
        return useful

    def _without_pipeline(
        self, shape: Layout, local: int, mode: str, technique: str
    ) -> Iterator[tuple[tuple[PlannedStage, ...], dict[str, object]]]:
        for reshard in ("auto",) if technique in UNSHARDED else ("auto", "never"):
            for count in divisors(local):
                more = {"reshard_after_forward": reshard, "microbatches": count}
                if self._wanted(**more):
                    yield self.one_stage, more

    def _waits_for_host(self, shape: Layout, batch: int) -> bool:
        """Whether a layer of so many samples takes no less time than one of half as many."""
        layer = self.cost.layer(shape.tp, shape.cp, 1, batch)
        return layer.forward < 1.5 * self.machine.layer_overhead

    def _pipelines(
        self, shape: Layout, local: int, mode: str, technique: str
    ) -> Iterator[tuple[tuple[PlannedStage, ...], dict[str, object]]]:
        for name, schedule in SCHEDULES.items():
            if not self._wanted(schedule=name) or (mode == "selective" and schedule.splits):
                continue
            least, multiple = schedule.microbatches(shape.pp)
            counts = [m for m in divisors(local) if m >= least and m % multiple == 0 and self._wanted(microbatches=m)]
            # The most have the smallest bubble; larger ones are faster where the host cannot start kernels fast enough.
            if counts:
                counts = counts[: -4 if self._waits_for_host(shape, local // counts[-1]) else -2 : -1]
            for own in range(schedule.least, (schedule.most or MOST_STAGES_PER_RANK) + 1):
                if counts and shape.pp * own <= len(self.spec.sequence) and self._wanted(stages_per_rank=own):
                    stages = self.stages(name, shape.pp, own)
                    for count in counts:
                        yield stages, {"schedule": name, "stages_per_rank": own, "microbatches": count}

    def chunked(self, layout: Layout, techniques: Techniques, batch: int) -> Techniques:
        """With the loss in chunks where the trainers would compute it so."""
        config = self.spec.config
        if "loss_chunks" in self.fixed:
            return replace(techniques, loss_chunks=self.fixed["loss_chunks"])  # type: ignore[arg-type]
        if not self.spec.definition.language:
            return techniques
        width = 8 if self.dtype == "fp64" else 4
        logits = -(-config.vocab_size // layout.tp) * batch * self.spec.tokens // layout.cp * width
        if logits <= 4 * CHUNK_BYTES:
            return techniques
        return replace(techniques, loss_chunks=min(math.ceil(logits / CHUNK_BYTES), self.spec.tokens // layout.cp))

    def evaluate(self, trial: Trial) -> Candidate:
        """What a trial costs."""
        spec, machine = self.spec, self.machine
        most, memory = self.memory.largest(trial)
        host = self.memory.on_host(trial)
        cost = self.cost.step(trial)
        kind = kind_of(trial.layout, trial.techniques.data_parallel)
        return Candidate(
            trial=trial,
            kind=f"{kind}·offload" if trial.techniques.offload else kind,
            memory=memory,
            fits=most <= machine.budget and host * machine.ranks_per_host <= (machine.host_memory or math.inf),
            cost=cost,
            tokens_per_second=self.global_batch * spec.tokens / cost.seconds,
            mfu=self.global_batch * spec.flops / (cost.seconds * self.peak * machine.ranks),
            host_memory=host,
        )
