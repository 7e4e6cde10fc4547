"""What a picture of a layout shows, before anything is drawn: shards of tensors by rank, and the bytes of a step.

Everything is read from a dry run: shards from the placements of its tensors, bytes from its calls to process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mmm.layout import Layout, Techniques
from mmm.parallel.cp.ring import positions_of
from mmm.traffic.operators import axes_of
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.held import HeldTensor, HeldTensors, coordinate_on
from mmm_lab.planner.sent_calls import SentCall

# Axes over which gradients are summed.
DATA = ("dp_shard", "dp_replicate", "dp_shard_cp", "expert_dp", "cp")
# Axes that the samples of a step, and their tokens, are shared out over.
SAMPLES = ("dp_replicate", "dp_shard", "cp")
# Operations that send nothing.
SILENT = ("receive", "barrier")
# Label of the grid that has one column for each expert.
EXPERTS = "experts"


@dataclass(frozen=True)
class Shard:
    """One of the shards that an axis makes of a dim."""

    axis: str
    index: int
    count: int


@dataclass(frozen=True)
class Grid:
    """A tensor as rows and columns, and the rectangle of it that a rank holds.

    Attributes:
        label: name of the tensor.
        rows: number of rows of the full tensor.
        columns: number of columns of the full tensor.
        top, bottom, left, right: edges of the rectangle, in rows and columns.
        shards: which shards the rectangle is; empty if every rank holds the same.
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
    """What a rank sends by one operation over one axis in one part of a step.

    Attributes:
        doing: ``forward``, ``backward`` or ``optimizer``.
        calls: number of calls.
        sent: bytes, as `Call.sent` counts them.
    """

    doing: str
    axis: str
    operation: str
    calls: int
    sent: float


@dataclass(frozen=True)
class Facts:
    """What the dry run of one layout shows."""

    dry: DryRun

    @cached_property
    def layout(self) -> Layout:
        return self.dry.ranks[0].held.layout

    @property
    def techniques(self) -> Techniques:
        return self.held(0).techniques

    def report(self, rank: int) -> RankReport:
        """The report of the rank of the dry run that stands for this one."""
        reports = self.dry.ranks
        stage = self.layout.coordinates(rank)["pp"]
        if stage == 0:
            return reports[0]
        if stage == self.layout.pp - 1:
            return reports[-1]
        # One rank stands for all stages between the first and the last.
        return reports[len(reports) // 2]

    def held(self, rank: int) -> HeldTensors:
        return self.report(rank).held

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The ranks of the group that a rank is in, by axis."""
        ulysses = self.techniques.ulysses_size(self.layout.cp)
        groups = {"world": tuple(range(self.layout.ranks))}
        # `axes_of` goes by the ranks of a group, since a call knows only these.
        axes = axes_of(self.layout, rank, self.experts is not None, ulysses)
        for ranks, axis in axes.items():
            groups[axis] = ranks
        return groups

    @property
    def loops(self) -> bool:
        """Whether each rank of a pipeline has several stages.

        Then messages to one rank belong to forward and to backward, and cannot be told apart.
        """
        return self.held(0).stages_per_rank > 1

    @property
    def frees_weights(self) -> bool:
        """Whether the weights that FSDP gathers for forward are gathered again for backward."""
        for report in self.dry.ranks:
            for flow in self.flows(report.rank):
                if flow.doing == "backward" and flow.operation == "all_gather" and flow.axis in DATA:
                    return True
        return False

    @cached_property
    def matrices(self) -> list[HeldTensor]:
        """The matrices that are drawn: the largest of a layer.

        If tp shards some matrices by rows and others by columns, the largest of each.
        """
        held = self.held(0)
        named = [tensor for tensor in held.parameters if len(tensor.shape) == 2]
        in_layers = [tensor for tensor in named if any(name.isdigit() for name in tensor.name.split("."))]
        unnamed = [tensor for tensor in held.updated if len(tensor.shape) == 2]
        matrices = sorted(in_layers or named or unnamed[:1], key=lambda tensor: -math.prod(tensor.shape))
        if not matrices:
            return []
        first = matrices[0]
        if _tp_dim(first) is not None:
            for other in matrices:
                if _tp_dim(other) not in (None, _tp_dim(first)):
                    return [first, other]
        return [first]

    @cached_property
    def experts(self) -> HeldTensor | None:
        """The matrices of all experts of a layer, which are one tensor: (experts, rows, columns)."""
        return next((tensor for tensor in self.held(0).parameters if len(tensor.shape) == 3), None)

    def grids(self, rank: int) -> list[Grid]:
        """What a rank holds all the time: weights, and of the first of them gradient and optimizer state."""
        grids = [self._grid(_short(tensor.name), tensor, rank) for tensor in self.matrices]
        if self.matrices:
            first = self.matrices[0]
            updated = next((tensor for tensor in self.held(0).updated if tensor.shape == first.shape), first)
            # ZeRO-1 updates a shard, and has the full gradient in memory.
            full_gradient = updated.gradient > math.prod(updated.local)
            grids.append(self._grid("gradient", first if full_gradient else updated, rank))
            grids.append(self._grid("optimizer", updated, rank))
        if self.experts is not None:
            grids.append(
                self._grid(
                    EXPERTS,
                    self.experts,
                    rank,
                    row_dim=1,
                    column_dim=0,
                )
            )
        return grids

    def _grid(
        self,
        label: str,
        tensor: HeldTensor,
        rank: int,
        row_dim: int = 0,
        column_dim: int = 1,
    ) -> Grid:
        box = tensor.box(self.layout, rank)
        shards = []
        for sharding in tensor.shardings:
            if sharding.ranks > 1:
                axis = sharding.axis
                if axis == "dp_shard_cp" and self.layout.dp_shard == 1:
                    # The bytes of a step call it cp.
                    axis = "cp"
                shards.append(Shard(axis, coordinate_on(sharding.axis, self.layout, rank), sharding.ranks))
        top = box.start[row_dim]
        left = box.start[column_dim]
        return Grid(
            label,
            rows=box.full[row_dim],
            columns=box.full[column_dim],
            top=top,
            bottom=top + box.length[row_dim],
            left=left,
            right=left + box.length[column_dim],
            shards=tuple(shards),
        )

    def batch(self, rank: int) -> list[Grid]:
        """The samples and tokens that a rank computes with in a step, as rectangles of the global batch.

        Over cp a rank has two pieces of each sequence (`positions_of`). Empty if the samples are not known.
        """
        return self._tokens(rank, self._positions(rank))

    def between_products(self, rank: int) -> list[Grid]:
        """The tokens that a rank of a tp group keeps between matrix products. Empty if each rank keeps all."""
        tp = self.layout.tp
        scattered = any(
            (flow.doing, flow.axis, flow.operation) == ("forward", "tp", "reduce_scatter") for flow in self.flows(rank)
        )
        if tp == 1 or not scattered:
            return []
        positions = self._positions(rank)
        # A sequence that does not divide leaves fewer tokens to the last rank.
        count = -(-len(positions) // tp)
        first = self.layout.coordinates(rank)["tp"] * count
        return self._tokens(rank, positions[first : first + count])

    def _positions(self, rank: int) -> list[int]:
        """Positions of a rank's tokens in each of its sequences. An image has a single position."""
        sample = self.held(0).sample
        if not sample:
            return []
        return positions_of(self.layout.coordinates(rank)["cp"], self.layout.cp, _length(sample)).tolist()

    def _tokens(self, rank: int, positions: Sequence[int]) -> list[Grid]:
        """The rectangles of the global batch that a rank has at some positions of its samples."""
        layout = self.layout
        coordinates = layout.coordinates(rank)
        shards = []
        for axis in SAMPLES:
            if layout.sizes[axis] > 1:
                shards.append(Shard(axis, coordinates[axis], layout.sizes[axis]))
        grids = []
        for left, right in _runs(positions):
            sample = self.held(0).sample
            local_batch = sample[0]
            top = layout.dp_coordinate(rank) * local_batch
            rows = local_batch * layout.dp
            grids.append(
                Grid(
                    label="batch",
                    rows=rows,
                    columns=_length(sample),
                    top=top,
                    bottom=top + local_batch,
                    left=left,
                    right=right,
                    shards=tuple(shards),
                )
            )
        return grids

    def modules(self, rank: int) -> tuple[str, ...]:
        """The modules of a pipeline rank's stages; empty without a pipeline."""
        stages = self.held(0).stages
        return stages[self.layout.coordinates(rank)["pp"]] if stages else ()

    def elements(self, rank: int) -> tuple[int, int]:
        """Number of elements of the parameters that a rank has, and that its stage has.

        Both are 0 if the dry run has no rank of that stage, nor of one with as many modules.
        """
        stage = self.layout.coordinates(rank)["pp"]
        reported = self.report(rank).coordinates["pp"]
        held = self.held(rank)
        if stage != reported and len(held.stages[stage]) != len(held.stages[reported]):
            return 0, 0
        # The shards of another rank follow from the placements of the rank that was run.
        local = sum(math.prod(tensor.box(self.layout, rank).length) for tensor in held.parameters)
        return local, sum(math.prod(tensor.shape) for tensor in held.parameters)

    def flows(self, rank: int) -> list[Flow]:
        """What a rank sends in a step, in the order in which each kind of call comes first."""
        calls = []
        for sent in self.report(rank).calls:
            # A group of one rank sends nothing, and a receive is counted where it is sent.
            if sent.call.size > 1 and sent.call.operation not in SILENT:
                calls.append(sent)
        flows: dict[tuple[str, str, str], Flow] = {}
        for doing, sent in zip(_doing(calls, self.loops), calls, strict=True):
            key = doing, sent.axis, sent.call.operation
            flow = flows.get(key, Flow(*key, 0, 0.0))
            calls_so_far = flow.calls + 1
            sent_so_far = flow.sent + sent.call.sent()
            flows[key] = flow._replace(calls=calls_so_far, sent=sent_so_far)
        return list(flows.values())

    def sent(self, rank: int) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis."""
        by_axis: dict[str, float] = {}
        for flow in self.flows(rank):
            by_axis[flow.axis] = by_axis.get(flow.axis, 0.0) + flow.sent
        return by_axis


def _tp_dim(tensor: HeldTensor) -> int | None:
    """The dim that tp shards; None if it shards none."""
    return next((sharding.dim for sharding in tensor.shardings if sharding.axis == "tp"), None)


def _short(name: str) -> str:
    """``w1`` for ``layers.0.feed_forward.w1.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2] or "weight"


def _length(sample: Sequence[int]) -> int:
    """Number of tokens in a sequence; 1 for images. `sample` is a shape."""
    return sample[1] if len(sample) == 2 else 1


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Splits ascending numbers at their gaps. Each run is its first number, and its last one plus 1."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return runs


def _doing(calls: Sequence[SentCall], loops: bool) -> list[str]:
    """The part of a step that each call belongs to: ``forward``, ``backward`` or ``optimizer``.

    A message to the next stage belongs to a forward, one to the stage before to a backward. What comes after the last
    backward belongs to the optimizer. Only sums of gradients always belong to a backward, even when a later micro-batch
    is in its forward.

    Args:
        loops: as `Facts.loops`; all messages then count as forward's.
    """
    is_message = [sent.axis == "pp" and sent.call.operation == "send" for sent in calls]
    last_backward = len(calls)
    for index, sent in enumerate(calls):
        if sent.doing == "backward" or is_message[index]:
            last_backward = index
    doing = []
    for index, sent in enumerate(calls):
        call = sent.call
        after = index > last_backward
        if is_message[index]:
            # `root` is the rank that gets the message.
            doing.append("forward" if loops or call.root > call.rank else "backward")
        elif call.operation == "reduce_scatter" and (after or sent.axis in DATA):
            doing.append("backward")
        elif after:
            doing.append("optimizer")
        else:
            doing.append(sent.doing)
    return doing
