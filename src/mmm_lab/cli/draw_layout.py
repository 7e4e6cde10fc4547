"""From the name of a layout to a small language model on it: the flags of ``mmm.trainer.lm``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mmm.errors import ConfigError
from mmm.layout import CP_STYLES, DATA_PARALLEL, Layout, Techniques
from mmm_lab.layout_name import ALL_AXES, MOST, parse_layout, words_of
from mmm_lab.planner.script import flags_of, in_words

WORDS = dict.fromkeys(DATA_PARALLEL, "dp_shard") | dict.fromkeys(CP_STYLES, "cp")  # whose ranks each is on
HELP = "such as dp2·tp2, pp2.dp2.tp2, fsdp4, zero1, hsdp, cp4, ulysses4, dp4.ep2; zero1:8 is ZeRO-1 on 8 ranks"


def layout_of(text: str) -> tuple[Layout, Techniques]:
    """A name taken apart. A technique without a number is on 4 ranks, or on those that the name gives its axis.

    Raises:
        ConfigError: it is none.
    """
    named, words = parse_layout(text, WORDS)
    sizes = dict.fromkeys(ALL_AXES, 1) | named
    chosen: dict[str, Any] = {}
    for word in words:
        kind = "data_parallel" if word in DATA_PARALLEL else "cp_style"
        if kind in chosen:
            raise ConfigError(f"layout {text!r} has {chosen[kind]} and {word}: give one of them")
        chosen[kind] = word
    if "data_parallel" in chosen and not named.keys() & {"dp_shard", "dp_replicate"}:
        sizes["dp_shard"] = 4
    if "cp_style" in chosen and "cp" not in named:
        sizes["cp"] = 4
    if chosen.get("data_parallel") == "hsdp" and "dp_replicate" not in named:
        if sizes["dp_shard"] % 2:
            raise ConfigError(f"layout {text!r}: hsdp has two replicas, and {sizes['dp_shard']} is odd")
        sizes |= {"dp_replicate": 2, "dp_shard": sizes["dp_shard"] // 2}
    layout = Layout(**sizes)
    if layout.ranks > MOST:
        raise ConfigError(f"layout {text!r} has {layout.ranks:,} ranks: at most {MOST:,} are drawn")
    chosen.setdefault("data_parallel", "hsdp" if layout.dp_replicate > 1 else "fsdp")
    return layout, Techniques(ulysses=2 if chosen.get("cp_style") == "usp" else None, **chosen)


def looks_like_one(text: str) -> bool:
    """Whether a part of the text is an axis with its size, or a technique: no module is called so."""
    return any(word in DATA_PARALLEL or re.fullmatch(r"[a-z_]*\d+", word) for word in words_of(text))


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of


def trainer_flags(layout: Layout, techniques: Techniques, given: Sequence[str]) -> list[str]:
    """Flags of ``mmm.trainer.lm``: of the layout, and of a model small enough to be drawn that goes with it.

    Args:
        given: by the user, which count instead.
    """
    heads = _multiple(layout.tp * (1 if techniques.cp_style == "ring" else layout.cp), 4)
    run = {
        "dataset": "random",
        "device": "cpu",
        "seq_length": _multiple(2 * layout.cp * layout.tp, 128),
        "batch_size": max(2, layout.pp),
    }
    model = {
        "preset": "debug",
        "n_layers": max(4, layout.pp),
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": 16 * heads,
        "ffn_dim": 40 * heads,
        "vocab_size": 64 * heads,
    }
    experts = {"n_experts": max(4, 2 * layout.ep) if layout.ep > 1 else None}
    names = {word[2:].partition("=")[0].replace("-", "_") for word in given if word.startswith("--")}
    if names & {*model, *experts}:  # the user's own model
        model = {}
    if "global_batch_size" in names:
        names.add("batch_size")
    flags = {**flags_of(layout, techniques), **run, **model, **experts}
    return [*in_words({name: value for name, value in flags.items() if name not in names}), *given]
