"""Where the ranks' cards stand, and what joins them: the stages of a pipeline side by side, in each the innermost axis
from left to right, and the others from top to bottom; an arrow between neighbours on an axis, as wide as the bytes."""

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

MOST_COLUMNS, WIDEST, NARROWEST = 8, 214.0, 96.0  # cards in a row; widths of one
BETWEEN, BESIDE, BLOCKS = 56.0, 48.0, 80.0  # rows; columns, at least; stages
STAGE = 6.0  # from a stage's frame to its cards
THICK, THIN = 15.0, 1.6  # arrows
AROUND = 12.0  # from the edge of the arrangement to its cards


@dataclass
class Arrangement:
    """Of the cards of some ranks, in a width."""

    facts: Facts
    ranks: Sequence[int]
    width: float
    x: float
    y: float

    @cached_property
    def columns_axis(self) -> str:
        """The innermost axis, besides pp, on which these ranks differ."""
        for axis in reversed(PLACES[1:]):
            if len({self._place(rank)[axis] for rank in self.ranks}) > 1:
                return axis
        return "tp"

    def _place(self, rank: int) -> dict[str, int]:
        """Coordinates, of which ep takes its part of dp_shard: side by side are ranks of one ep group, below each other
        those of one expert_dp group."""
        place, ep = self.facts.layout.coordinates(rank), self.facts.layout.ep
        return place | {"dp_shard": place["dp_shard"] // ep, "ep": place["dp_shard"] % ep}

    @cached_property
    def cells(self) -> dict[int, tuple[int, int, int]]:
        """Of each rank: stage, row and column."""
        places = {rank: self._place(rank) for rank in self.ranks}
        count = len({place[self.columns_axis] for place in places.values()})
        per_row = next(n for n in range(min(count, MOST_COLUMNS), 0, -1) if count % n == 0)
        found, rows = {}, dict[tuple[int, ...], int]()
        for rank, place in places.items():
            turn, column = divmod(place[self.columns_axis], per_row)
            others = tuple(place[axis] for axis in PLACES[1:] if axis != self.columns_axis)
            row = rows.setdefault((*others, turn), len(rows))
            found[rank] = place["pp"], row, column
        first = min(stage for stage, _, _ in found.values())
        return {rank: (stage - first, row, column) for rank, (stage, row, column) in found.items()}

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """Stages, rows and columns."""
        return tuple(max(cell[at] for cell in self.cells.values()) + 1 for at in range(3))  # type: ignore[return-value]

    @cached_property
    def beside(self) -> float:
        """Between two columns: the names of the axes have room."""
        names = [axis for axis, sent in self.facts.sent(self.ranks[0]).items() if sent and axis != "pp"]
        return max(BESIDE, *(1.1 * text_width(name, 9, bold=True) + 8 for name in names), 0.0)

    @cached_property
    def card_width(self) -> float:
        stages, _, columns = self.counts
        gaps = stages * (columns - 1) * self.beside + (stages - 1) * BLOCKS + 2 * AROUND
        return min(max((self.width - gaps) / (stages * columns), NARROWEST), WIDEST)

    @cached_property
    def card_height(self) -> float:
        return max(card(self.facts, rank, 0, 0, self.card_width)[1] for rank in self.ranks)

    @property
    def full_width(self) -> float:
        stages = self.counts[0]
        return stages * self._block + (stages - 1) * BLOCKS + 2 * AROUND

    @property
    def _block(self) -> float:
        return self.counts[2] * self.card_width + (self.counts[2] - 1) * self.beside

    @property
    def bottom(self) -> float:
        rows = self.counts[1]
        return self.y + 2 * AROUND + rows * self.card_height + (rows - 1) * BETWEEN

    def corner(self, rank: int) -> tuple[float, float]:
        """Left and top of a card."""
        stage, row, column = self.cells[rank]
        left = self.x + AROUND + stage * (self._block + BLOCKS) + column * (self.card_width + self.beside)
        return left, self.y + AROUND + row * (self.card_height + BETWEEN)

    def items(self) -> list[Item]:
        """Frames of stages, cards, and the arrows between them."""
        found = self._stages()
        for rank in self.ranks:
            x, y = self.corner(rank)
            found.append(Rect(x, y, self.card_width, self.card_height, fill="paper", stroke="ink", line=1, radius=6))
            found += card(self.facts, rank, x, y, self.card_width)[0]
        return found + self._arrows()

    def _stages(self) -> list[Item]:
        """A frame around the cards of a stage, of several: what goes to the next stage goes from frame to frame."""
        stages, rows, columns = self.counts
        if stages == 1 or rows * columns == 1:
            return []
        high = rows * self.card_height + (rows - 1) * BETWEEN + 2 * STAGE
        found: list[Item] = []
        for stage in range(stages):
            left = self.x + AROUND + stage * (self._block + BLOCKS) - STAGE
            box = left, self.y + AROUND - STAGE, self._block + 2 * STAGE, high
            found.append(Rect(*box, stroke=color_of("pp"), radius=9, dashed=True))
        return found

    def _arrows(self) -> list[Item]:
        found: list[Item] = []
        at = {cell: rank for rank, cell in self.cells.items()}
        for (stage, row, column), rank in at.items():
            if (right := at.get((stage, row, column + 1))) is not None:
                found += self._beside(rank, right)
            if (below := at.get((stage, row + 1, column))) is not None:
                found += self._below(rank, below, column)
            if column == self.counts[2] - 1 and (stage + 1, row, column) in at:
                found += self._between_stages(rank, at[stage + 1, row, column])
                ends = [(at[stage, row, each], at[stage + 1, row, each]) for each in range(self.counts[2])]
                found += self._pairs(ends) if len(self.ranks) > self.counts[0] else []
        return found

    def _level(self, begin: float, end: float, y: float, axis: str, text: str, sent: float, both: bool) -> list[Item]:
        """A level arrow: a text above it, the bytes below."""
        line, middle = self.line(sent), (begin + end) / 2
        return [
            *arrow(begin, y, end, y, line, color_of(axis), both),
            Text(middle, y - line / 2 - 6, text, 9, "middle", bold=True),
            Text(middle, y + line / 2 + 13, units.size(sent), 9, "middle"),
        ]

    def _beside(self, rank: int, other: int) -> list[Item]:
        x, y = self.corner(rank)
        left = x + self.card_width
        items: list[Item] = []
        flows = self._over(rank, other)
        y += 0.42 * self.card_height - 22 * (len(flows) - 1)
        for axis, sent in flows:
            items += self._level(left + 3, left + self.beside - 3, y, axis, axis, sent, both=True)
            y += 52
        return items

    def _below(self, rank: int, other: int, column: int) -> list[Item]:
        x, y = self.corner(rank)
        top, found = y + self.card_height, list[Item]()
        middle = x + 0.25 * self.card_width
        for axis, sent in self._over(rank, other):
            found += arrow(middle, top + 3, middle, top + BETWEEN - 15, self.line(sent), color_of(axis), both=True)
            near = middle + self.line(sent) / 2 + 7
            found.append(Text(near, top + 18, axis, 9, bold=True))
            found.append(Text(near, top + 30, units.size(sent), 9))
            middle = max(middle + 0.4 * self.card_width, near + 1.1 * text_width(axis, 9, bold=True) + THICK)
        return found

    def _pairs(self, ends: Sequence[tuple[int, int]]) -> list[Item]:
        """Below the arrows between the stages of a row: each rank, and the one in its place of the next stage."""
        x, y = self.corner(ends[-1][0])
        middle, y = x + self.card_width + BLOCKS / 2, y + 0.36 * self.card_height + (40 if self.facts.loops else 94)
        texts = [f"{rank} ↔ {other}" for rank, other in ends]
        lines = [", ".join(texts[first : first + 2]) for first in range(0, len(texts), 2)]
        return [Text(middle, y + 11 * at, line, 8.5, "middle", opacity=0.8) for at, line in enumerate(lines)]

    def _between_stages(self, rank: int, other: int) -> list[Item]:
        """Activations to the right, above; their gradients to the left. Of ranks with several stages, whose messages
        are not told apart, one arrow."""
        x, y = self.corner(rank)
        frame = STAGE if len(self.ranks) > self.counts[0] else 0.0
        left, right = x + self.card_width + frame + 4, x + self.card_width + BLOCKS - frame - 4
        y += 0.36 * self.card_height
        if self.facts.loops:
            sent = self.facts.sent(self.ranks[0]).get("pp", 0.0)
            return self._level(left, right, y, "pp", "pp", sent, both=True)
        forward = self._level(left, right, y, "pp", "activations", self._messages(rank, "forward"), both=False)
        backward = self._level(right, left, y + 54, "pp", "gradients", self._messages(other, "backward"), both=False)
        return forward + backward

    def _messages(self, rank: int, part: str) -> float:
        """Bytes that a rank sends to another stage in a part of a step."""
        flows = self.facts.flows(rank)
        return sum(flow.sent for flow in flows if (flow.axis, flow.operation, flow.part) == ("pp", "send", part))

    def _over(self, rank: int, other: int) -> list[tuple[str, float]]:
        """The axes on which two ranks are in one group, and what the first sends over each in a step."""
        groups = self.facts.groups(rank)
        return [(axis, sent) for axis, sent in self.facts.sent(rank).items() if sent and other in groups.get(axis, ())]

    def line(self, sent: float) -> float:
        """Width of an arrow: in proportion to the bytes, of the most that any rank sends over an axis."""
        most = max((count for rank in self.ranks for count in self.facts.sent(rank).values()), default=1.0)
        return max(THICK * sent / max(most, 1.0), THIN)
