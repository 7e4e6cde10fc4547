"""What a picture of a layout shows, before anything is drawn: shards of tensors by rank, and the bytes of a step.

Everything is read from a dry run: shards from the placements of its tensors, bytes from its calls to process groups.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques
from mmm.parallel.cp.ring import positions_of
from mmm.traffic.operators import axes_of
from mmm_lab.layout_name import split_axes
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.held import HeldTensor, HeldTensors
from mmm_lab.planner.sent_calls import SentCall

# Axes over which gradients are summed.
DATA = ("dp_shard", "dp_replicate", "dp_shard_cp", "expert_dp", "cp")
# Axes that the samples of a step, and their tokens, are shared out over.
SAMPLES = ("dp_replicate", "dp_shard", "cp")
# Operations that send nothing.
SILENT = ("receive", "barrier")


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

    @property
    def axes(self) -> list[str]:
        """The axes that have more than one rank."""
        return split_axes(self.layout)

    def place(self, rank: int) -> str:
        """A rank's coordinates, as text."""
        coordinates = self.layout.coordinates(rank)
        # ep takes its ranks from dp_shard.
        coordinates["ep"] = coordinates["dp_shard"] % self.layout.ep
        return " · ".join(f"{axis} {coordinates[axis]}" for axis in self.axes)

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
        named = _matrices_of(held.parameters)
        # A name of a layer's tensor has the layer's number.
        in_layers = [tensor for tensor in named if re.search(r"\b\d+\b", tensor.name)]
        unnamed = _matrices_of(held.updated)[:1]
        matrices = sorted(in_layers or named or unnamed, key=lambda tensor: -math.prod(tensor.shape))
        for other in matrices:
            # One by rows and one by columns.
            if {_tp_dim(matrices[0]), _tp_dim(other)} == {0, 1}:
                return [matrices[0], other]
        return matrices[:1]

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
            gradient = updated
            if updated.gradient > math.prod(updated.local):
                gradient = first
            grids.append(self._grid("gradient", gradient, rank))
            grids.append(self._grid("optimizer", updated, rank))
        if self.experts is not None:
            grids.append(
                # A column for each expert.
                self._grid(
                    "experts",
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
            names = [sharding.axis]
            if sharding.axis == "dp_shard_cp":
                names = ["dp_shard", "cp"]
            axes += [name for name in names if self.layout.sizes.get(name, sharding.ranks) > 1]
        piece = (
            box.start[row_dim],
            box.start[column_dim],
            box.length[row_dim],
            box.length[column_dim],
        )
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

        Raises:
            ConfigError: cp splits no sequences, but rows of fields.
        """
        sample = self.held(0).sample
        if not sample:
            return None
        layout = self.layout
        # An image has a single position.
        length = sample[1] if len(sample) == 2 else 1
        if layout.cp > length:
            raise ConfigError(
                f"cp {layout.cp} splits the rows of fields (cp_style space), of which there is no picture yet: "
                f"`mmm dry-run` says what a rank holds and sends"
            )
        samples = sample[0] * layout.dp
        top = layout.dp_coordinate(rank) * sample[0]
        pieces = []
        for run in positions_of(layout.coordinates(rank)["cp"], layout.cp, length).chunk(2):
            pieces.append((top, int(run[0]), sample[0], len(run)))
        return Grid(
            f"batch: samples {top + 1}–{top + sample[0]} of {samples}",
            rows=samples,
            columns=length,
            pieces=tuple(pieces),
            axes=tuple(axis for axis in self.axes if axis in SAMPLES),
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
        # The bytes of each call, by what the calls of a kind have in common.
        sent_by: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        parts = _doing(calls, self.loops)
        for doing, sent in zip(parts, calls, strict=True):
            sent_by[doing, sent.axis, sent.call.operation].append(sent.call.sent())
        return [Flow(*kind, len(sizes), sum(sizes)) for kind, sizes in sent_by.items()]


def _matrices_of(tensors: Sequence[HeldTensor]) -> list[HeldTensor]:
    return [tensor for tensor in tensors if len(tensor.shape) == 2]


def _tp_dim(tensor: HeldTensor) -> int | None:
    """The dim that tp shards; None if it shards none."""
    return next((sharding.dim for sharding in tensor.shardings if sharding.axis == "tp"), None)


def _short(name: str) -> str:
    """``w1`` for ``layers.0.feed_forward.w1.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2] or "weight"


def _doing(calls: Sequence[SentCall], loops: bool) -> Iterator[str]:
    """Yield the part of a step that each call belongs to: ``forward``, ``backward`` or ``optimizer``.

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
    for index, sent in enumerate(calls):
        call = sent.call
        after = index > last_backward
        if is_message[index]:
            # `root` is the rank that gets the message.
            yield "forward" if loops or call.root > call.rank else "backward"
        elif call.operation == "reduce_scatter" and (after or sent.axis in DATA):
            yield "backward"
        elif after:
            yield "optimizer"
        else:
            yield sent.doing
