"""From the name of a layout to a small language model on it: the flags of ``mmm.trainer.lm``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from mmm.errors import ConfigError
from mmm.layout import AXES, CP_STYLES, DATA_PARALLEL
from mmm_lab.layout_name import ALL_AXES, MOST, parse_layout, words_of

WORDS = dict.fromkeys(DATA_PARALLEL, "dp_shard") | dict.fromkeys(CP_STYLES, "cp")  # whose ranks each is on
HELP = "such as dp2·tp2, pp2.dp2.tp2, fsdp4, zero1, hsdp, cp4, ulysses4, dp4.ep2; zero1:8 is ZeRO-1 on 8 ranks"


@dataclass
class NamedLayout:
    """A layout by its name.

    Attributes:
        sizes: of each axis. technique: of data parallel; empty where the name has none. cp_style: empty for the usual.
    """

    text: str
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALL_AXES, 1))
    technique: str = ""
    cp_style: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes[axis] for axis in AXES)


def layout_of(text: str) -> NamedLayout:
    """A name taken apart. Raises ConfigError: it is none."""
    sizes, words = parse_layout(text, WORDS)
    found = NamedLayout(text)
    found.sizes |= sizes
    for word in words:
        kind = "technique" if word in DATA_PARALLEL else "cp_style"
        if before := getattr(found, kind):
            raise ConfigError(f"layout {text!r} has {before} and {word}: give one of them")
        setattr(found, kind, word)
    _fill_in(found, sizes.keys())
    return found


def looks_like_one(text: str) -> bool:
    """Whether a part of the text is an axis with its size, or a technique: no module is called so."""
    return any(word in DATA_PARALLEL or re.fullmatch(r"[a-z_]*\d+", word) for word in words_of(text))


def _fill_in(found: NamedLayout, given: Set[str]) -> None:
    """A technique without a number is on 4 ranks, or on those that the name gives its axis."""
    if found.technique and not given & {"dp_shard", "dp_replicate"}:
        found.sizes["dp_shard"] = 4
    if found.cp_style and "cp" not in given:
        found.sizes["cp"] = 4
    if found.technique == "hsdp" and "dp_replicate" not in given:
        if found.sizes["dp_shard"] % 2:
            raise ConfigError(f"layout {found.text!r}: hsdp has two replicas, and {found.sizes['dp_shard']} is odd")
        found.sizes["dp_replicate"], found.sizes["dp_shard"] = 2, found.sizes["dp_shard"] // 2
    if found.ranks > MOST:
        raise ConfigError(f"layout {found.text!r} has {found.ranks:,} ranks: at most {MOST:,} are drawn")


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of


def trainer_flags(layout: NamedLayout, given: Sequence[str]) -> list[str]:
    """Flags of ``mmm.trainer.lm``: of the layout, and of a model small enough to be drawn that goes with it.

    Args:
        given: by the user, which count instead.
    """
    sizes = layout.sizes
    axes = {"tpsize" if axis == "tp" else axis: size for axis, size in sizes.items() if size > 1 and axis != "dp_shard"}
    by_heads = sizes["tp"] * (sizes["cp"] if layout.cp_style in ("ulysses", "usp") else 1)
    heads = _multiple(by_heads, 4)
    run = {
        "parallel": layout.technique or ("hsdp" if sizes["dp_replicate"] > 1 else "fsdp"),
        "cp_style": layout.cp_style or None,
        "ulysses": 2 if layout.cp_style == "usp" else None,
        "dataset": "random",
        "device": "cpu",
        "seq_length": _multiple(2 * sizes["cp"] * sizes["tp"], 128),
        "batch_size": max(2, sizes["pp"]),
    }
    model = {
        "preset": "debug",
        "n_layers": max(4, sizes["pp"]),
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": 16 * heads,
        "ffn_dim": 40 * heads,
        "vocab_size": 64 * heads,
    }
    experts = {"n_experts": max(4, 2 * sizes["ep"]) if sizes["ep"] > 1 else None}
    names = {word[2:].partition("=")[0].replace("-", "_") for word in given if word.startswith("--")}
    if names & {*model, *experts}:  # the user's own model
        model = {}
    if "global_batch_size" in names:
        names.add("batch_size")
    flags = []
    for name, value in {**axes, **run, **model, **experts}.items():
        if name not in names and value is not None:
            flags += [f"--{name}", str(value)]
    return [*flags, *given]
