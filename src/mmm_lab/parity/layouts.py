"""Layouts by name, such as ``pp2.dp2.tp2``, and the matrix of those that are compared with one device.

Imports no torch: a wrong name costs no import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from mmm.errors import ConfigError
from mmm.layout import Layout, ScheduleName, Techniques
from mmm_lab.layout_name import ALL_AXES, parse_layout

OPTIMIZERS = ("sgd", "adamw")
OTHERS = "images"  # the rows of models that the matrix does not name


@dataclass(frozen=True, kw_only=True)
class ParityCase(Techniques):
    """Techniques, on a layout of a model.

    Attributes:
        model: the model's name (`mmm_lab.parity.models`).
        layout: the layout's name as `canonical` writes it.
        data: ``made_up``, by the model's own module; ``packed``, several documents in a sequence, whose attention and
            positions end with them; ``chats``, of which only answers have targets.
        optimizers: names of the optimizers. Each makes one comparison.
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
        return layout_of(self.sizes).ranks

    @property
    def technique(self) -> str:
        """What the sizes of the layout leave open, such as ``1F1B, fsdp``."""
        sizes = self.sizes
        names: list[str] = []
        if "pp" in sizes:
            names.append(self.schedule)
        data_parallel = self.data_parallel
        # FSDP with replicas is called so.
        if data_parallel == "fsdp" and "dp_replicate" in sizes:
            data_parallel = "hsdp"
        if data_parallel != "fsdp" or "dp_shard" in sizes:
            names.append(data_parallel)
        if "cp" in sizes and self.ulysses:
            names.append(f"{self.cp_style} {self.ulysses}")
        elif "cp" in sizes:
            names.append(self.cp_style)
        if self.checkpointing != "none":
            names.append(f"{self.checkpointing} checkpointing")
        if self.offload:
            names.append("offload")
        if self.data != "made_up":
            names.append(self.data)
        return ", ".join(names)

    def __str__(self) -> str:
        name = f"{self.model} {self.layout}"
        if self.technique:
            name += f" ({self.technique})"
        return name


def make_case(model: str, layout: str, technique: str = "") -> ParityCase:
    """Make a case.

    Args:
        layout: its name, in any spelling.
        technique: what the layout leaves open, such as ``ulysses+packed``.

    Raises:
        ConfigError: there is no such layout, or no such word.
    """
    techniques: dict[str, Any] = {}
    for word in filter(None, technique.split("+")):
        if word not in FIELDS:
            raise ConfigError(f"--case {technique}: {word!r} is none of {', '.join(FIELDS)}")
        techniques[FIELDS[word]] = True if word == "offload" else word
    # USP leaves open how many ranks of cp share heads.
    if techniques.get("cp_style") == "usp":
        techniques["ulysses"] = 2
    case = ParityCase(model=model, layout=canonical(layout), **techniques)
    return replace(case, optimizers=optimizers_for(case))


def sizes_of(name: str) -> dict[str, int]:
    """Returns the axes of a layout's name with their sizes, outermost first, without those of one rank.

    Raises:
        ConfigError: there is no such layout.
    """
    named, _ = parse_layout(name)
    sizes = {}
    for axis in ALL_AXES:
        if named.get(axis, 1) > 1:
            sizes[axis] = named[axis]
    return sizes


def canonical(name: str) -> str:
    """Returns a layout's name with its axes outermost first and a middle dot between them."""
    return str(layout_of(sizes_of(name)))


def layout_of(sizes: Mapping[str, int]) -> Layout:
    """Returns the layout with these axes. Others have one rank."""
    # The default of dp_shard is what the other axes leave.
    return Layout(**{"dp_shard": 1, **sizes})


def ranks_of(texts: Sequence[str]) -> set[int]:
    """Read numbers of ranks from ``4``, ``1..8``, ``2,4``.

    Raises:
        ConfigError: it is none of these.
    """
    counts: set[int] = set()
    for text in ",".join(texts).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", text)
        first = last = 0
        if match is not None:
            first = int(match[1])
            last = int(match[2] or first)
        if not 1 <= first <= last:
            raise ConfigError(f"--ranks {text}: give a number of ranks from 1, or a range such as 1..8")
        counts.update(range(first, last + 1))
    return counts


def optimizers_for(case: ParityCase) -> tuple[str, ...]:
    """Returns the optimizers that a case is compared by, if nobody says.

    SGD shows a gradient that is wrong by a factor; AdamW does not. AdamW shows a state that is wrong. It is added where
    one technique is used by itself, on up to 4 ranks: 8 are slow.
    """
    # HSDP and expert parallelism need two axes.
    axes = case.sizes.keys()
    one_technique = len(axes) < 2 or axes in ({"dp_replicate", "dp_shard"}, {"dp_shard", "ep"})
    is_plain = case.checkpointing == "none" and case.data == "made_up"
    if one_technique and is_plain and case.ranks <= 4:
        return OPTIMIZERS
    return ("sgd",)


DATA_PARALLEL = ("fsdp", "ddp", "zero1", "zero2")
SCHEDULES = get_args(ScheduleName)
# Word of the matrix → field of `ParityCase`.
FIELDS = {
    **dict.fromkeys(DATA_PARALLEL, "data_parallel"),
    **dict.fromkeys(SCHEDULES, "schedule"),
    **dict.fromkeys(("ring", "ulysses", "usp", "space"), "cp_style"),
    **dict.fromkeys(("full", "selective"), "checkpointing"),
    **dict.fromkeys(("packed", "chats"), "data"),
    "offload": "offload",
}
# Field → the axes on one of which it has an effect.
AXES_OF = {"data_parallel": ("dp_replicate", "dp_shard"), "schedule": ("pp",), "cp_style": ("cp",)}
# Word of the matrix → the words that it stands for.
EVERY = {"every_dp": DATA_PARALLEL, "every_schedule": SCHEDULES}


MATRIX = Path(__file__).with_name("matrix.txt")


@lru_cache
def read_matrix(path: Path = MATRIX) -> dict[str, dict[str, list[str]]]:
    """Returns the cases of a file, by model and layout, each as the words of the file."""
    rows: dict[str, dict[str, list[str]]] = {}
    model = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        # A line of a layout is indented below its model's.
        if line.startswith(" "):
            layout, *cases = line.split()
            rows[model][layout] = []
            for case in cases:
                rows[model][layout] += EVERY.get(case, (case,))
        elif line and not line.startswith("#"):
            model = line
            rows[model] = {}
    return rows


def matrix(model: str, path: Path = MATRIX) -> Iterator[ParityCase]:
    """Yields the cases of a model in a file. One that the package's matrix does not name has those of images."""
    rows = read_matrix(path)
    for layout, cases in rows.get(model, rows.get(OTHERS, {})).items():
        for case in cases:
            # Where a row says nothing, it has a dash.
            yield make_case(model, layout, case.removeprefix("-"))
