"""Layouts by name, such as ``pp2.dp2.tp2``, and the matrix of those that are held against one device.

Imports no torch: a wrong name costs no import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from mmm.errors import ConfigError
from mmm.layout import Layout, ScheduleName, Techniques
from mmm_lab.layout_name import ALL_AXES, parse_layout

OPTIMIZERS = ("sgd", "adamw")
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


# Layout -> techniques, each a case of its own; + joins two in one case, - is the defaults: FSDP, ring, 1F1B.
_ALL_DP = "fsdp ddp zero1 zero2"
_SCHEDULES = " ".join(get_args(ScheduleName))
_IMAGES = {
    "1": "-",
    "dp2": _ALL_DP,
    "dp4": _ALL_DP,
    "dp8": "fsdp",
    "dp_replicate2": "ddp",
    "dp_replicate2·dp_shard2": "fsdp",
    "tp2": "-",
    "tp4": "-",
    "tp8": "-",
    "pp2": "GPipe 1F1B Interleaved1F1B ZBVZeroBubble",
    "pp4": "GPipe 1F1B",
    "dp2·tp2": "- zero1",
    "pp2·dp2": "- zero1",
    "pp2·tp2": "-",
    "dp_replicate2·dp_shard2·tp2": "-",
    "pp2·dp2·tp2": "- zero1",
}
_REAL = {layout: f"{_IMAGES[layout]} digits" for layout in ("dp2", "pp2")}
MATRIX: dict[str, dict[str, str]] = {
    "transformer": {
        "1": "- full selective packed chats",
        "dp2": f"{_ALL_DP} packed ddp+packed lars+lamb zero1+lars+lamb zero2+lars+lamb ddp+lars+lamb chats offload",
        "dp4": f"{_ALL_DP}",
        "dp8": "fsdp",
        "dp_replicate2": "fsdp ddp",
        "dp_replicate2·dp_shard2": "fsdp packed lars+lamb",
        "tp2": "- packed lars+lamb chats",
        "tp4": "-",
        "tp8": "-",
        "cp2": "ring ulysses packed ulysses+packed chats",
        "cp4": "ring ulysses usp packed ulysses+packed usp+packed",
        "cp8": "ring usp",
        "pp2": f"{_SCHEDULES} packed ZBVZeroBubble+packed lars+lamb chats",
        "pp4": _SCHEDULES,
        "dp2·tp2": "- full packed full+packed lars+lamb zero1 zero2 lars+lamb+zero1",
        "dp4·tp2": "-",
        "dp2·tp4": "-",
        "dp2·cp2": "ring ulysses lars+lamb zero1 ulysses+zero2",
        "cp2·tp2": "ring ulysses packed ulysses+packed zero1",
        "cp2·tp4": "-",
        "cp4·tp2": "usp usp+packed",
        "dp2·cp4": "usp",
        "dp_replicate2·tp2": "-",
        "dp_replicate2·cp2": "-",
        "pp2·dp2": f"{_SCHEDULES} packed zero1 zero2 ZBVZeroBubble+zero1",
        "pp4·dp2": "-",
        "pp2·dp_replicate2": "-",
        "pp2·tp2": "1F1B ZBVZeroBubble",
        "pp4·tp2": "-",
        "pp2·cp2": "ring ulysses",
        "pp2·cp4": "usp usp+packed",
        "dp_replicate2·dp_shard2·tp2": "-",
        "dp_replicate2·dp_shard2·cp2": "-",
        "pp2·dp_replicate2·dp_shard2": "-",
        "dp2·cp2·tp2": "ring ulysses packed chats zero1",
        "pp2·dp2·tp2": "1F1B Interleaved1F1B ZBVZeroBubble packed lars+lamb chats zero1 DualPipeV+zero1",
        "pp2·cp2·tp2": "- packed",
        "pp2·dp2·cp2": "- packed ulysses+packed zero1",
    },
    "moe": {
        "1": "-",
        "dp2": "fsdp zero1",
        "tp2": "- zero1",
        "dp2·ep2": "- zero1",
        "dp4·ep2": "- zero1 zero2",
        "dp4·ep4": "-",
        "dp8·ep4": "-",
        "dp2·cp2·ep2": "ring ulysses packed zero1",
        "dp2·cp4·ep2": "usp",
        "dp2·tp2·ep2": "- lars+lamb zero2+lars+lamb zero1",
        "dp_replicate2·dp_shard2·ep2": "-",
        "pp2·dp2·ep2": "1F1B ZBVZeroBubble packed lars+lamb zero1 ZBVZeroBubble+zero1",
        "pp2·dp2·tp2·ep2": "- zero1",
    },
    "gpt": {
        "1": "- full selective packed",
        "dp2": f"{_ALL_DP} packed",
        "dp4": "fsdp",
        "dp_replicate2·dp_shard2": "-",
        "tp2": "- packed",
        "tp4": "-",
        "cp2": "ring ulysses packed ulysses+packed",
        "cp4": "ring usp usp+packed",
        "pp2": f"{_SCHEDULES} packed",
        "pp4": "1F1B",
        "dp2·tp2": "- full packed zero1 lars+lamb chats",
        "dp2·cp2": "- packed",
        "cp2·tp2": "ring ulysses packed",
        "pp2·dp2": "1F1B ZBVZeroBubble packed zero1",
        "pp2·tp2": "1F1B ZBVZeroBubble",
        "pp2·cp2": "ring packed",
        "dp2·cp2·tp2": "-",
        "pp2·dp2·tp2": "1F1B ZBVZeroBubble packed",
        "pp2·cp2·tp2": "- packed",
    },
    "gpt_dropout": {
        "1": "- full",
        "dp2": _ALL_DP,
        "tp2": "-",
        "tp4": "-",
        "pp2": "1F1B ZBVZeroBubble",
        "dp2·tp2": "- full",
        "pp2·dp2": "-",
        "pp2·tp2": "-",
        "pp2·dp2·tp2": "-",
    },
    "plain_gpt": {
        "1": "- full",
        "dp2": _ALL_DP,
        "dp_replicate2·dp_shard2": "-",
        "tp2": "-",
        "tp4": "-",
        "cp2": "ring",
        "cp4": "usp",
        "dp2·tp2": "- full lars+lamb zero1",
        "dp2·cp2·tp2": "-",
        "pp2": "1F1B",
        "pp2·dp2": "- zero1",
    },
    "llama": {
        "1": "-",
        "dp2": "fsdp zero2",
        "tp2": "-",
        "cp2": "ring",
        "cp4": "usp",
        "pp2": _SCHEDULES,
        "dp2·tp2": "-",
        "pp2·dp2": "1F1B ZBVZeroBubble",
        "pp4": "1F1B Interleaved1F1B",
        "pp2·tp2": "-",
        "pp2·cp2": "-",
        "pp2·dp2·tp2": "-",
    },
    "head_norm": {
        "1": "-",
        "dp2": _ALL_DP,
        "tp2": "-",
        "tp4": "-",
        "dp2·tp2": "- full zero1",
        "pp2·tp2": "1F1B",
    },
    "regression": {"1": "-", "dp2": "fsdp", "tp2": "-", "pp2": "1F1B", "dp2·tp2": "-", "pp2·dp2": "-"},
    "batch_norm": {
        "1": "-",
        "dp2": _ALL_DP,
        "dp4": "fsdp ddp",
        "dp_replicate2·dp_shard2": "-",
        "tp2": "-",
        "dp2·tp2": "- zero1",
        "dp_replicate2·dp_shard2·tp2": "-",
    },
    "vit": {**_IMAGES, **_REAL, "pp4": _SCHEDULES, "dp2·tp2": "- zero1"},
    "cnn": {**_IMAGES, **_REAL},
}
FIELDS = {
    **dict.fromkeys(("fsdp", "ddp", "zero1", "zero2"), "data_parallel"),
    **dict.fromkeys(_SCHEDULES.split(), "schedule"),
    **dict.fromkeys(("ring", "ulysses", "usp"), "cp_style"),
    **dict.fromkeys(("full", "selective"), "checkpointing"),
    **dict.fromkeys(("digits", "packed", "chats"), "data"),
    "offload": "offload",
}
VALUES = {"offload": True}  # Of a name that is not its value.


def matrix(model: str) -> Iterator[ParityCase]:
    """The cases of a model; of one that the matrix does not name, those of images."""
    for layout, entries in MATRIX.get(model, _IMAGES).items():
        for entry in entries.split():
            own = tuple(name for name in entry.split("+") if name in LARGE_BATCH)
            named = {FIELDS[name]: VALUES.get(name, name) for name in entry.split("+") if name not in ("-", *own)}
            ulysses = ulysses_of(named.get("cp_style"))
            case = ParityCase(model=model, layout=canonical(layout), ulysses=ulysses, **named)  # type: ignore[arg-type]
            yield replace(case, optimizers=own or optimizers_for(case))
