"""Cells in columns, for tables of plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def in_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Returns a line for each row, with two spaces between columns.

    Args:
        right: indices of the columns whose cells are aligned to the right.
    """
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        align = str.ljust
        if index in right:
            align = str.rjust
        width = max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    # Back to rows. No line ends with spaces.
    lines = []
    for cells in zip(*columns, strict=True):
        lines.append("  ".join(cells).rstrip())
    return lines
