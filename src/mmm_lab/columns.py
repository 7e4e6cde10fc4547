"""Cells in columns, for tables of plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def in_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line a row, two spaces between two columns.

    Args:
        right: the columns whose cells end at the right, by number.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
