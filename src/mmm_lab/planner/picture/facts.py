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
from mmm_lab.planner.held import HeldTensor, HeldTensors
from mmm_lab.planner.sent_calls import SentCall

# Axes over which gradients are summed.
DATA = ("dp_shard", "dp_replicate", "dp_shard_cp", "expert_dp", "cp")
# Axes that the samples of a step, and their tokens, are shared out over.
SAMPLES = ("dp_replicate", "dp_shard", "cp")
# Operations that send nothing.
SILENT = ("receive", "barrier")
# Label of the grid that has one column for each expert.
EXPERTS = "experts"


# A rectangle of a tensor: its first row and column, and how many it has of each.
Piece = tuple[int, int, int, int]


class Grid(NamedTuple):
    """A tensor as rows and columns, and the pieces of it that a rank holds.

    Attributes:
        rows: number of rows of the full tensor.
        columns: number of columns of the full tensor.
        axes: the axes that cut the tensor; empty if every rank holds all of it.
    """

    label: str
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    axes: tuple[str, ...]


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

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of the group of an axis that a rank is in."""
        layout = self.layout
        ulysses = self.techniques.ulysses_size(layout.cp)
        # `axes_of` goes by the ranks of a group, since a call knows only these.
        for ranks, name in axes_of(layout, rank, self.experts is not None, ulysses).items():
            if name == axis:
                return ranks
        return tuple(range(layout.ranks))

    def place(self, rank: int) -> str:
        """A rank's coordinates, as text."""
        layout = self.layout
        coordinates = layout.coordinates(rank)
        if layout.ep > 1:
            # ep takes its ranks from dp_shard.
            coordinates["ep"] = coordinates["dp_shard"] % layout.ep
        shared = [axis for axis in coordinates if layout.sizes.get(axis, layout.ep) > 1]
        return " · ".join(f"{axis} {coordinates[axis]}" for axis in shared)

    @property
    def loops(self) -> bool:
        """Whether each rank of a pipeline has several stages.

        Then messages to one rank belong to forward and to backward, and cannot be told apart.
        """
        return self.held(0).stages_per_rank > 1

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
        axes: list[str] = []
        for sharding in tensor.shardings:
            # FSDP takes the ranks of cp too.
            names = ["dp_shard", "cp"] if sharding.axis == "dp_shard_cp" else [sharding.axis]
            axes += [name for name in names if self.layout.sizes.get(name, sharding.ranks) > 1]
        piece = box.start[row_dim], box.start[column_dim], box.length[row_dim], box.length[column_dim]
        return Grid(
            label,
            rows=box.full[row_dim],
            columns=box.full[column_dim],
            pieces=(piece,) if math.prod(piece[2:]) else (),
            axes=tuple(axes),
        )

    def batch(self, rank: int) -> Grid | None:
        """The samples and tokens that a rank computes with in a step, as pieces of the global batch.

        Over cp a rank has two pieces of each sequence (`positions_of`). None if the samples are not known.
        """
        sample = self.held(0).sample
        if not sample:
            return None
        layout = self.layout
        # An image has a single position.
        length = sample[1] if len(sample) == 2 else 1
        runs = _runs(positions_of(layout.coordinates(rank)["cp"], layout.cp, length).tolist())
        top = layout.dp_coordinate(rank) * sample[0]
        label = f"batch: samples {top + 1}–{top + sample[0]} of {sample[0] * layout.dp}"
        return Grid(
            label,
            rows=sample[0] * layout.dp,
            columns=length,
            pieces=tuple((top, left, sample[0], right - left) for left, right in runs),
            axes=tuple(axis for axis in SAMPLES if layout.sizes[axis] > 1),
        )

    def modules(self, rank: int) -> tuple[str, ...]:
        """The modules of a pipeline rank's stages; empty without a pipeline."""
        stages = self.held(0).stages
        return stages[self.layout.coordinates(rank)["pp"]] if stages else ()

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


def _tp_dim(tensor: HeldTensor) -> int | None:
    """The dim that tp shards; None if it shards none."""
    return next((sharding.dim for sharding in tensor.shardings if sharding.axis == "tp"), None)


def _short(name: str) -> str:
    """``w1`` for ``layers.0.feed_forward.w1.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2] or "weight"


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
