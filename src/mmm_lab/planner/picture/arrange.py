"""Places the cards of the ranks, and the arrows between them.

The stages of a pipeline are side by side. Inside a stage, the innermost axis goes from left to right, and the others
from top to bottom. An arrow joins neighbours on an axis, and is as wide as the bytes that they send each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mmm import units
from mmm.layout import AXES
from mmm_lab.planner.picture.cards import card, color_of
from mmm_lab.planner.picture.facts import Facts
from mmm_lab.planner.picture.scene import Item, Rect, Text, arrow, text_width

PLACES = (*AXES, "ep")  # outermost first
MOST_COLUMNS = 8  # cards in a row of a stage
WIDEST = 214.0  # a card
NARROWEST = 96.0  # a card
BETWEEN = 56.0  # distance between two rows
BESIDE = 48.0  # least distance between two columns
BLOCKS = 80.0  # distance between two stages
STAGE = 6.0  # from a stage's frame to its cards
THICK = 15.0  # the widest arrow
THIN = 1.6  # the narrowest arrow
AROUND = 12.0  # from the edge of the arrangement to its cards


@dataclass
class Arrangement:
    """The cards of some ranks, in a given width.

    Args:
        x, y: the upper left corner.
    """

    facts: Facts
    ranks: Sequence[int]
    width: float
    x: float
    y: float

    @cached_property
    def columns_axis(self) -> str:
        """The innermost axis, other than pp, on which these ranks differ."""
        for axis in reversed(PLACES[1:]):
            if len({self._place(rank)[axis] for rank in self.ranks}) > 1:
                return axis
        return "tp"

    def _place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, with those on dp_shard split into ep and the rest.

        So the ranks of one ep group are side by side, and those of one expert_dp group below each other.
        """
        place = self.facts.layout.coordinates(rank)
        place["dp_shard"], place["ep"] = divmod(place["dp_shard"], self.facts.layout.ep)
        return place

    @cached_property
    def cells(self) -> dict[int, tuple[int, int, int]]:
        """Stage, row and column of each rank."""
        places = {rank: self._place(rank) for rank in self.ranks}
        count = len({place[self.columns_axis] for place in places.values()})
        # The most columns that make all rows equally long.
        per_row = next(n for n in range(min(count, MOST_COLUMNS), 0, -1) if count % n == 0)
        first_stage = min(place["pp"] for place in places.values())
        cells = {}
        rows: dict[tuple[int, ...], int] = {}
        for rank, place in places.items():
            line, column = divmod(place[self.columns_axis], per_row)
            other_axes = [place[axis] for axis in PLACES[1:] if axis != self.columns_axis]
            # Ranks that agree on all other axes share a row; rows are numbered as they come.
            row = rows.setdefault((*other_axes, line), len(rows))
            cells[rank] = place["pp"] - first_stage, row, column
        return cells

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of stages, of rows and of columns."""
        stages, rows, columns = zip(*self.cells.values(), strict=True)
        return max(stages) + 1, max(rows) + 1, max(columns) + 1

    @cached_property
    def beside(self) -> float:
        """Distance between two columns. The names of the axes have room in it."""
        # Between columns an arrow has the name of its axis above it.
        names = [axis for axis, sent in self.facts.sent(self.ranks[0]).items() if sent and axis != "pp"]
        return max([BESIDE, *(1.1 * text_width(name, 9, bold=True) + 8 for name in names)])

    @cached_property
    def card_width(self) -> float:
        stages, _, columns = self.counts
        # What cards cannot use of the width.
        gaps = stages * (columns - 1) * self.beside + (stages - 1) * BLOCKS + 2 * AROUND
        # Cards share the width that is left, within limits.
        return min(max((self.width - gaps) / (stages * columns), NARROWEST), WIDEST)

    @cached_property
    def card_height(self) -> float:
        # All cards are as high as the highest.
        return max(card(self.facts, rank, 0, 0, self.card_width)[1] for rank in self.ranks)

    @property
    def full_width(self) -> float:
        stages = self.counts[0]
        return stages * self._stage_width + (stages - 1) * BLOCKS + 2 * AROUND

    @property
    def _stage_width(self) -> float:
        columns = self.counts[2]
        return columns * self.card_width + (columns - 1) * self.beside

    @property
    def _stage_height(self) -> float:
        rows = self.counts[1]
        return rows * self.card_height + (rows - 1) * BETWEEN

    @property
    def bottom(self) -> float:
        return self.y + 2 * AROUND + self._stage_height

    def corner(self, rank: int) -> tuple[float, float]:
        """The upper left corner of a card."""
        stage, row, column = self.cells[rank]
        left = self.x + AROUND + stage * (self._stage_width + BLOCKS) + column * (self.card_width + self.beside)
        return left, self.y + AROUND + row * (self.card_height + BETWEEN)

    def items(self) -> list[Item]:
        """Frames of stages, cards, and the arrows between them."""
        items = self._frames()
        for rank in self.ranks:
            x, y = self.corner(rank)
            items.append(
                Rect(
                    x,
                    y,
                    self.card_width,
                    self.card_height,
                    fill="paper",
                    stroke="ink",
                    line=1,
                    radius=6,
                )
            )
            items += card(self.facts, rank, x, y, self.card_width)[0]
        return items + self._arrows()

    @property
    def _framed(self) -> bool:
        """Whether stages have frames: there are several, each with several cards."""
        stages, rows, columns = self.counts
        return stages > 1 and rows * columns > 1

    def _frames(self) -> list[Item]:
        """A frame around the cards of each stage. Arrows between stages go from frame to frame."""
        items: list[Item] = []
        if not self._framed:
            return items
        # A frame is STAGE wider than its cards on every side.
        for stage in range(self.counts[0]):
            left = self.x + AROUND + stage * (self._stage_width + BLOCKS) - STAGE
            top = self.y + AROUND - STAGE
            width = self._stage_width + 2 * STAGE
            height = self._stage_height + 2 * STAGE
            items.append(
                Rect(
                    left,
                    top,
                    width,
                    height,
                    stroke=color_of("pp"),
                    radius=9,
                    dashed=True,
                )
            )
        return items

    def _arrows(self) -> list[Item]:
        items: list[Item] = []
        columns = self.counts[2]
        rank_at = {cell: rank for rank, cell in self.cells.items()}
        for (stage, row, column), rank in rank_at.items():
            # Only neighbours are joined: an arrow stands for the whole group.
            right = rank_at.get((stage, row, column + 1))
            if right is not None:
                items += self._beside(rank, right)
            below = rank_at.get((stage, row + 1, column))
            if below is not None:
                items += self._below(rank, below)
            next_stage = rank_at.get((stage + 1, row, column))
            if column == columns - 1 and next_stage is not None:
                # One arrow for the whole row.
                items += self._between_stages(rank, next_stage)
                if self._framed:
                    pairs = [(rank_at[stage, row, n], rank_at[stage + 1, row, n]) for n in range(columns)]
                    items += self._pairs(pairs)
        return items

    def _level(
        self,
        begin: float,
        end: float,
        y: float,
        axis: str,
        text: str,
        sent: float,
        both: bool,
    ) -> list[Item]:
        """A horizontal arrow, with a text above it and the bytes below."""
        line = self.line(sent)
        middle = (begin + end) / 2
        return [
            *arrow(begin, y, end, y, line=line, fill=color_of(axis), both=both),
            Text(
                middle,
                y - line / 2 - 6,
                text,
                size=9,
                anchor="middle",
                bold=True,
            ),
            Text(
                middle,
                y + line / 2 + 13,
                units.size(sent),
                size=9,
                anchor="middle",
            ),
        ]

    def _beside(self, rank: int, other: int) -> list[Item]:
        """Arrows to the next card on the right, one below another."""
        x, y = self.corner(rank)
        left = x + self.card_width
        items: list[Item] = []
        sent_over = self._sent_over(rank, other)
        # The arrows are centred a little above the middle of the card.
        y += 0.42 * self.card_height - 22 * (len(sent_over) - 1)
        for axis, sent in sent_over:
            items += self._level(
                left + 3,
                left + self.beside - 3,
                y,
                axis=axis,
                text=axis,
                sent=sent,
                both=True,
            )
            y += 52
        return items

    def _below(self, rank: int, other: int) -> list[Item]:
        """Arrows to the card below, side by side."""
        x, y = self.corner(rank)
        top = y + self.card_height
        middle = x + 0.25 * self.card_width
        items: list[Item] = []
        for axis, sent in self._sent_over(rank, other):
            items += arrow(
                middle,
                top + 3,
                middle,
                top + BETWEEN - 15,
                line=self.line(sent),
                fill=color_of(axis),
                both=True,
            )
            # Right of the arrow, however wide it is.
            text_x = middle + self.line(sent) / 2 + 7
            items.append(Text(text_x, top + 18, axis, size=9, bold=True))
            items.append(Text(text_x, top + 30, units.size(sent), 9))
            middle = max(middle + 0.4 * self.card_width, text_x + 1.1 * text_width(axis, 9, bold=True) + THICK)
        return items

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> list[Item]:
        """Below the arrow between two stages: which rank of one sends to which rank of the other."""
        x, y = self.corner(pairs[-1][0])
        middle = x + self.card_width + BLOCKS / 2
        y += 0.36 * self.card_height
        # Below one arrow, or below two.
        y += 40 if self.facts.loops else 94
        # Each rank talks to the rank in the same place of the next stage.
        texts = [f"{rank} ↔ {other}" for rank, other in pairs]
        items: list[Item] = []
        for first in range(0, len(texts), 2):
            items.append(
                Text(
                    middle,
                    y,
                    ", ".join(texts[first : first + 2]),
                    size=8.5,
                    anchor="middle",
                    opacity=0.8,
                )
            )
            y += 11
        return items

    def _between_stages(self, rank: int, other: int) -> list[Item]:
        """Activations go to the right, above; their gradients to the left, below.

        If ranks have several stages their messages cannot be told apart: there is one arrow for all.
        """
        x, y = self.corner(rank)
        frame = 0.0
        if self._framed:
            frame = STAGE
        left = x + self.card_width + frame + 4
        right = x + self.card_width + BLOCKS - frame - 4
        y += 0.36 * self.card_height
        if self.facts.loops:
            sent = self.facts.sent(self.ranks[0]).get("pp", 0.0)
            return self._level(
                left,
                right,
                y,
                axis="pp",
                text="pp",
                sent=sent,
                both=True,
            )
        # The forward of this stage sends activations on; the backward of the next sends gradients back.
        forward = self._level(
            left,
            right,
            y,
            axis="pp",
            text="activations",
            sent=self._messages(rank, "forward"),
            both=False,
        )
        backward = self._level(
            right,
            left,
            y + 54,
            axis="pp",
            text="gradients",
            sent=self._messages(other, "backward"),
            both=False,
        )
        return forward + backward

    def _messages(self, rank: int, doing: str) -> float:
        """Bytes that a rank sends to other stages in a part of a step."""
        flows = self.facts.flows(rank)
        return sum(flow.sent for flow in flows if (flow.axis, flow.operation, flow.doing) == ("pp", "send", doing))

    def _sent_over(self, rank: int, other: int) -> list[tuple[str, float]]:
        """The axes on which two ranks are in one group, with the bytes that the first sends over each in a step."""
        # Neighbours on the page need not talk to each other.
        groups = self.facts.groups(rank)
        return [(axis, sent) for axis, sent in self.facts.sent(rank).items() if sent and other in groups.get(axis, ())]

    def line(self, sent: float) -> float:
        """Width of an arrow, in proportion to the bytes. The widest stands for the most that any rank sends."""
        # Of all ranks that are drawn, so that arrows of one picture can be compared.
        most = max((count for rank in self.ranks for count in self.facts.sent(rank).values()), default=1.0)
        return max(THICK * sent / max(most, 1.0), THIN)
