"""How a parameter starts, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Init:
    """How the elements of one parameter are drawn.

    ``normal``: mean 0, standard deviation `scale`. ``uniform``: in [-scale, scale). ``constant``: `scale` everywhere.
    The row numbered `zero_row`, if any, starts with zeros (what an embedding does for padding).
    """

    kind: str
    scale: float
    zero_row: int | None = None
