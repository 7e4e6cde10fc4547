"""Layouts by name, such as ``pp2.dp2.tp2``, and the matrix of those that are held against one device.

Imports no torch: a wrong name costs no import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from mmm.errors import ConfigError
from mmm.layout import Layout, ScheduleName, Techniques
from mmm_lab.layout_name import ALL_AXES, parse_layout

OPTIMIZERS = ("sgd", "adamw")
OTHERS = "images"  # the rows of models that the matrix does not name
LARGE_BATCH = ("lars", "lamb")  # they need norms of full tensors


@dataclass(frozen=True, kw_only=True)
class ParityCase(Techniques):
    """Techniques, on a layout of a model.

    Attributes:
        model: its name (`mmm_lab.parity.models`). layout: the name as `canonical` writes it.
        data: ``made_up``, by the model's own module; ``digits``, real images; ``packed``, made up, several documents in
            a sequence, whose attention and positions end with them; ``chats``, of which only answers have targets.
        optimizers: one training each.
    """

    model: str
    layout: str
    data: str = "made_up"
    optimizers: tuple[str, ...] = OPTIMIZERS

    @property
    def sizes(self) -> dict[str, int]:
        return sizes_of(self.layout)

    @property
    def ranks(self) -> int:
        return Layout(**{"dp_shard": 1, **self.sizes}).ranks

    @property
    def technique(self) -> str:
        """What the sizes of the layout leave open, such as ``1F1B, fsdp``."""
        sizes = self.sizes
        dp = "hsdp" if self.data_parallel == "fsdp" and sizes.get("dp_replicate", 1) > 1 else self.data_parallel
        shown = {
            self.schedule: "pp" in sizes,
            dp: bool({"dp_replicate", "dp_shard"} & sizes.keys()) or dp != "fsdp",
            self.cp_style + (f" {self.ulysses}" if self.ulysses else ""): "cp" in sizes,
            f"{self.checkpointing} checkpointing": self.checkpointing != "none",
            "offload": self.offload,
            self.data: self.data != "made_up",
        }
        return ", ".join(name for name, needed in shown.items() if needed)

    def __str__(self) -> str:
        return f"{self.model} {self.layout}" + (f" ({self.technique})" if self.technique else "")


def sizes_of(name: str) -> dict[str, int]:
    """The axes of a layout's name and their sizes, outermost first, those of one rank left out. Raises ConfigError."""
    sizes, _ = parse_layout(name)
    return {axis: sizes[axis] for axis in ALL_AXES if sizes.get(axis, 1) > 1}


def canonical(name: str) -> str:
    """A layout's name with its axes outermost first and a middle dot between them."""
    return str(Layout(**{"dp_shard": 1, **sizes_of(name)}))


def ranks_of(texts: Sequence[str]) -> set[int]:
    """Numbers of ranks from ``4``, ``1..8``, ``2,4``.

    Raises:
        ConfigError: it is none of these.
    """
    counts: set[int] = set()
    for word in ",".join(texts).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(f"--ranks {word}: give a number of ranks from 1, or a range such as 1..8")
        counts.update(range(first, last + 1))
    return counts


def ulysses_of(cp_style: object) -> int | None:
    """Ranks of cp that share heads, in a style that leaves it open."""
    return 2 if cp_style == "usp" else None


def optimizers_for(case: ParityCase) -> tuple[str, ...]:
    """Both where one technique stands alone (on up to 4 ranks: 8 are slow); for products SGD, which shows a gradient
    that is wrong by a factor."""
    alone = len(case.sizes) < 2 or case.sizes.keys() in ({"dp_replicate", "dp_shard"}, {"dp_shard", "ep"})
    plain = (case.checkpointing, case.data) == ("none", "made_up")
    return OPTIMIZERS if alone and plain and case.ranks <= 4 else ("sgd",)


FIELDS = {  # word of the matrix → field of Techniques
    **dict.fromkeys(("fsdp", "ddp", "zero1", "zero2"), "data_parallel"),
    **dict.fromkeys(get_args(ScheduleName), "schedule"),
    **dict.fromkeys(("ring", "ulysses", "usp"), "cp_style"),
    **dict.fromkeys(("full", "selective"), "checkpointing"),
    **dict.fromkeys(("digits", "packed", "chats"), "data"),
}
EVERY = {"every_dp": ("fsdp", "ddp", "zero1", "zero2"), "every_schedule": get_args(ScheduleName)}


@lru_cache
def read_matrix() -> dict[str, dict[str, list[str]]]:
    """Model → layout → its cases, as `matrix.txt` has them."""
    rows: dict[str, dict[str, list[str]]] = {}
    model = ""
    for line in Path(__file__).with_name("matrix.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            layout, *words = line.split()
            rows[model][layout] = [case for word in words for case in EVERY.get(word, (word,))]
        elif line and not line.startswith("#"):
            model = line
            rows[model] = {}
    return rows


def matrix(model: str) -> Iterator[ParityCase]:
    """The cases of a model; of one that the matrix does not name, those of images."""
    rows = read_matrix()
    for layout, words in rows.get(model, rows[OTHERS]).items():
        for word in words:
            names = word.split("+")
            own = tuple(name for name in names if name in LARGE_BATCH)
            fields: dict[str, Any] = {FIELDS[name]: name for name in names if name in FIELDS}
            if "offload" in names:
                fields["offload"] = True
            ulysses = ulysses_of(fields.get("cp_style"))
            case = ParityCase(model=model, layout=canonical(layout), ulysses=ulysses, **fields)
            yield replace(case, optimizers=own or optimizers_for(case))
