"""What a picture of a layout shows, before anything is drawn: the parts of tensors by rank, and the bytes of a step.

Everything is read off a dry run: shards from the placements of its tensors, bytes from its calls to process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mmm.layout import Layout, Techniques
from mmm.nn.draw import ShardBox
from mmm.parallel.cp.ring import positions_of
from mmm.traffic.operators import axes_of
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.held import HeldTensor, HeldTensors, coordinate_on
from mmm_lab.planner.sent_calls import SentCall

PARTS = ("forward", "backward", "optimizer")  # of a step
DATA = ("dp_shard", "dp_replicate", "dp_shard_cp", "expert_dp", "cp")  # axes over which gradients are summed
SAMPLES = ("dp_replicate", "dp_shard", "cp")  # axes that samples and their tokens are shared out over
SILENT = ("receive", "barrier")
EXPERTS = "experts"  # label of a grid: an expert a column


@dataclass(frozen=True)
class Shard:
    """Which of the shards that an axis makes of a dim."""

    axis: str
    index: int
    count: int


@dataclass(frozen=True)
class Grid:
    """A tensor as rows and columns, and the part of it that a rank holds.

    Attributes:
        label: what it is. rows, columns: of the full tensor.
        top, bottom, left, right: edges of the part, in rows and columns.
        shards: which one it is; empty where every rank has the same part.
    """

    label: str
    rows: int
    columns: int
    top: int
    bottom: int
    left: int
    right: int
    shards: tuple[Shard, ...] = ()

    @property
    def empty(self) -> bool:
        return self.bottom <= self.top or self.right <= self.left


class Flow(NamedTuple):
    """What a rank sends by one operation over one axis in one part of a step: calls, and bytes by `Call.sent`."""

    part: str
    axis: str
    operation: str
    calls: int
    sent: float
    ranks: int


@dataclass(frozen=True)
class Facts:
    """What the dry run of one layout has shown."""

    dry: DryRun

    @cached_property
    def layout(self) -> Layout:
        return self.dry.ranks[0].held.layout

    @property
    def techniques(self) -> Techniques:
        return self.held(0).techniques

    def report(self, rank: int) -> RankReport:
        """That of the dry run's rank which stands for this one: of the same stage, or of one in the middle."""
        reports, stage, last = self.dry.ranks, self.layout.coordinates(rank)["pp"], self.layout.pp - 1
        return reports[0] if stage == 0 else reports[-1 if stage == last else len(reports) // 2]

    def held(self, rank: int) -> HeldTensors:
        return self.report(rank).held

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """By axis, the ranks of the group that a rank is in."""
        ulysses = self.techniques.ulysses_size(self.layout.cp)
        found = axes_of(self.layout, rank, self.experts is not None, ulysses)
        return {"world": tuple(range(self.layout.ranks)), **{axis: ranks for ranks, axis in found.items()}}

    @property
    def loops(self) -> bool:
        """Whether the ranks of a pipeline have several stages each. Then a message to a rank may be of a forward or of
        a backward: they are not told apart."""
        return self.held(0).stages_per_rank > 1

    @property
    def frees_weights(self) -> bool:
        """Whether what FSDP has gathered for forward is gathered once more for backward."""
        flows = [flow for report in self.dry.ranks for flow in self.flows(report.rank)]
        return any((f.part, f.operation) == ("backward", "all_gather") and f.axis in DATA for f in flows)

    @cached_property
    def matrices(self) -> list[HeldTensor]:
        """The matrices that are drawn: the largest of a layer, and where tp shards some by rows and others by columns,
        one of each."""
        held = self.held(0)
        named = [each for each in held.parameters if len(each.shape) == 2]
        some = [each for each in named if any(word.isdigit() for word in each.name.split("."))] or named
        some = some or [each for each in held.updated if len(each.shape) == 2][:1]
        largest = sorted(some, key=lambda each: -math.prod(each.shape))
        if not largest:
            return []
        first = largest[0]
        other = next((each for each in largest if _tp_dim(each) not in (None, _tp_dim(first))), None)
        return [first] if _tp_dim(first) is None or other is None else [first, other]

    @cached_property
    def experts(self) -> HeldTensor | None:
        """The matrices of the experts of a layer, as one tensor."""
        return next((each for each in self.held(0).parameters if len(each.shape) == 3), None)

    def grids(self, rank: int) -> list[Grid]:
        """What a rank holds all the time: weights, and of the first of them gradient and optimizer state."""
        grids = [self._grid(_short(each.name), each, rank) for each in self.matrices]
        if self.matrices:
            first = self.matrices[0]
            updated = next((each for each in self.held(0).updated if each.shape == first.shape), first)
            full = updated.gradient > math.prod(updated.local)
            grids.append(self._grid("gradient", first if full else updated, rank))
            grids.append(self._grid("optimizer", updated, rank))
        if self.experts is not None:
            box, shards = self.experts.box(self.layout, rank), self.shards(self.experts, rank)
            across = ShardBox(*(tuple(part[dim] for dim in (1, 0)) for part in (box.start, box.length, box.full)))
            grids.append(_of_box(EXPERTS, across, shards))
        return grids

    def shards(self, tensor: HeldTensor, rank: int) -> tuple[Shard, ...]:
        several = [s for s in tensor.shardings if s.ranks > 1]
        return tuple(Shard(self._axis(s.axis), coordinate_on(s.axis, self.layout, rank), s.ranks) for s in several)

    def _axis(self, name: str) -> str:
        """As the bytes of a step have it: dp_shard × cp is cp where dp_shard has one rank."""
        return "cp" if name == "dp_shard_cp" and self.layout.dp_shard == 1 else name

    def _grid(self, label: str, tensor: HeldTensor, rank: int) -> Grid:
        return _of_box(label, tensor.box(self.layout, rank), self.shards(tensor, rank))

    def batch(self, rank: int) -> list[Grid]:
        """The samples of a step, and of each the tokens, that a rank computes with, in pieces: over cp it has two of
        each sequence (`positions_of`). Empty where nobody says the samples."""
        return [self._tokens(rank, run) for run in _runs(self._positions(rank))]

    def between_products(self, rank: int) -> list[Grid]:
        """Of these, what a rank of a tp group keeps between the matrix products; empty where each keeps all."""
        tp, positions = self.layout.tp, self._positions(rank)
        scattered = any((f.part, f.axis, f.operation) == ("forward", "tp", "reduce_scatter") for f in self.flows(rank))
        if tp == 1 or not scattered:
            return []
        own, index = -(-len(positions) // tp), self.layout.coordinates(rank)["tp"]
        return [self._tokens(rank, run) for run in _runs(positions[index * own : (index + 1) * own])]

    def _positions(self, rank: int) -> list[int]:
        """Of a rank's tokens in each of its sequences; of samples that are none, a single one."""
        sample, cp = self.held(0).sample, self.layout.cp
        if not sample:
            return []
        return [int(p) for p in positions_of(self.layout.coordinates(rank)["cp"], cp, _length(sample))]

    def _tokens(self, rank: int, run: tuple[int, int]) -> Grid:
        layout, sample = self.layout, self.held(0).sample
        local, coordinate = sample[0], layout.dp_coordinate(rank)
        place, counts = layout.coordinates(rank), {axis: getattr(layout, axis) for axis in SAMPLES}
        shards = [Shard(axis, place[axis], count) for axis, count in counts.items() if count > 1]
        first = coordinate * local
        return Grid("batch", local * layout.dp, _length(sample), first, first + local, *run, tuple(shards))

    def modules(self, rank: int) -> tuple[str, ...]:
        """Of a pipeline, the modules of a rank's stages; empty without."""
        stages = self.held(0).stages
        return stages[self.layout.coordinates(rank)["pp"]] if stages else ()

    def elements(self, rank: int) -> tuple[int, int]:
        """Of the parameters: those that a rank has, and those of its stage; none of either where the dry run has no
        rank of that stage, nor of one with as many modules."""
        stage = self.layout.coordinates(rank)["pp"]
        if stage != (seen := self.report(rank).coordinates["pp"]):
            stages = self.held(rank).stages
            if len(stages[stage]) != len(stages[seen]):
                return 0, 0
        parameters = self.held(rank).parameters
        local = (math.prod(each.box(self.layout, rank).length) for each in parameters)
        return sum(local), sum(math.prod(each.shape) for each in parameters)

    def calls(self, rank: int) -> list[tuple[str, SentCall]]:
        """The calls of a step that send something, in their order, each with its part of the step."""
        report = self.report(rank)
        calls = [each for each in report.calls if each.call.size > 1 and each.call.operation not in SILENT]
        return list(zip(_parts_of(calls, self.loops), calls, strict=True))

    def flows(self, rank: int) -> list[Flow]:
        """What a rank sends in a step, in the order in which each came first."""
        found: dict[tuple[str, str, str], Flow] = {}
        for part, each in self.calls(rank):
            key = part, each.axis, each.call.operation
            before = found.get(key, Flow(*key, 0, 0.0, each.call.size))
            found[key] = before._replace(calls=before.calls + 1, sent=before.sent + each.call.sent())
        return list(found.values())

    def sent(self, rank: int) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis."""
        by_axis: dict[str, float] = {}
        for flow in self.flows(rank):
            by_axis[flow.axis] = by_axis.get(flow.axis, 0.0) + flow.sent
        return by_axis


def _tp_dim(tensor: HeldTensor) -> int | None:
    return next((s.dim for s in tensor.shardings if s.axis == "tp"), None)


def _short(name: str) -> str:
    """``w1`` of ``layers.0.feed_forward.w1.weight``."""
    words = [word for word in name.split(".") if word != "weight"]
    return words[-1] if words else "weight"


def _of_box(label: str, box: ShardBox, shards: tuple[Shard, ...]) -> Grid:
    (top, left), (rows, columns) = box.start[:2], box.length[:2]
    full_rows, full_columns = box.full[:2]
    return Grid(label, full_rows, full_columns, top, top + rows, left, left + columns, shards)


def _length(sample: Sequence[int]) -> int:
    """Tokens of a sequence; 1 for an image."""
    return sample[1] if len(sample) == 2 else 1


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The stretches without a gap of numbers in ascending order: first, and one after the last."""
    runs: list[tuple[int, int]] = []
    for at in positions:
        if runs and runs[-1][1] == at:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs


def _parts_of(calls: Sequence[SentCall], loops: bool) -> list[str]:
    """The part of a step that each call belongs to. A message to the next stage is of a forward, one to the stage
    before of a backward. What comes after the last backward is of the optimizer, but for sums of gradients, which may
    also be sent while a later micro-batch is in its forward.

    Args:
        loops: as `Facts.loops`: all messages count as forward's.
    """
    sends = [each.axis == "pp" and each.call.operation == "send" for each in calls]
    last = max((at for at, each in enumerate(calls) if each.doing == "backward" or sends[at]), default=len(calls))
    parts = []
    for at, each in enumerate(calls):
        call = each.call
        if sends[at]:
            parts.append("forward" if loops or call.root > call.rank else "backward")
        elif call.operation == "reduce_scatter" and (at > last or each.axis in DATA):
            parts.append("backward")
        else:
            parts.append("optimizer" if at > last or each.doing == "optimizer" else each.doing)
    return parts
