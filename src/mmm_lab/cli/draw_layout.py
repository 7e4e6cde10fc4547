"""From the name of a layout to a small language model on it: the flags of ``mmm.trainer.lm``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmm.errors import ConfigError
from mmm.layout import DATA_PARALLEL, SEQUENCE_STYLES, Layout, Techniques
from mmm_lab.layout_name import ALL_AXES, MOST, parse_layout, words_of
from mmm_lab.planner.script import flags_of, in_words

# Technique → the axis whose ranks it is on.
AXIS_OF_TECHNIQUE = dict.fromkeys(DATA_PARALLEL, "dp_shard") | dict.fromkeys(SEQUENCE_STYLES, "cp")
USUAL_RANKS = 4  # of a technique whose name has no size
HELP = "such as dp2·tp2, pp2.dp2.tp2, fsdp4, zero1, hsdp, cp4, ulysses4, dp4.ep2; zero1:8 is ZeRO-1 on 8 ranks"


def layout_of(name: str) -> tuple[Layout, Techniques]:
    """Read the name of a layout. A technique without a size is on 4 ranks, or on those that the name gives its axis.

    Raises:
        ConfigError: it is not the name of a layout.
    """
    named, techniques = parse_layout(name, AXIS_OF_TECHNIQUE)
    data_parallel = _one_of(DATA_PARALLEL, techniques, name)
    cp_style = _one_of(SEQUENCE_STYLES, techniques, name)
    sizes = dict.fromkeys(ALL_AXES, 1) | named
    if data_parallel and "dp_shard" not in named and "dp_replicate" not in named:
        sizes["dp_shard"] = USUAL_RANKS
    if cp_style and "cp" not in named:
        sizes["cp"] = USUAL_RANKS
    # hsdp4 is two replicas of two ranks each.
    if data_parallel == "hsdp" and "dp_replicate" not in named:
        if sizes["dp_shard"] % 2:
            raise ConfigError(f"layout {name!r}: hsdp has two replicas, and {sizes['dp_shard']} is odd")
        sizes["dp_replicate"] = 2
        sizes["dp_shard"] //= 2
    layout = Layout(**sizes)
    if layout.ranks > MOST:
        raise ConfigError(f"layout {name!r} has {layout.ranks:,} ranks: at most {MOST:,} are drawn")
    if not data_parallel:
        data_parallel = "fsdp" if layout.dp_replicate == 1 else "hsdp"
    ulysses = None
    # USP leaves open how many ranks share heads.
    if cp_style == "usp":
        ulysses = 2
    return layout, Techniques(data_parallel=data_parallel, cp_style=cp_style or "ring", ulysses=ulysses)


def _one_of(kind: Sequence[str], techniques: Sequence[str], name: str) -> str:
    """Returns the technique of a kind that was named; empty if none was. Raises ConfigError: two were."""
    chosen = [technique for technique in techniques if technique in kind]
    if len(chosen) > 1:
        raise ConfigError(f"layout {name!r} has {chosen[0]} and {chosen[1]}: give one of them")
    return "".join(chosen)


def looks_like_a_layout(text: str) -> bool:
    """Is a word of the text an axis with its size, or a technique? No module is called so."""
    return any(word in DATA_PARALLEL or re.fullmatch(r"[a-z_]*\d+", word) for word in words_of(text))


def _multiple(factor: int, least: int) -> int:
    """Returns the smallest multiple of `factor` that is at least `least`."""
    return -(-least // factor) * factor


def trainer_flags(layout: Layout, techniques: Techniques, own_flags: Sequence[str]) -> list[str]:
    """Returns flags of ``mmm.trainer.lm``: those of the layout, and of a model small enough to be drawn that fits it.

    Args:
        own_flags: the user's, which replace them.
    """
    head_shards = layout.tp
    # Ulysses shards the heads over cp, too.
    if techniques.cp_style != "ring":
        head_shards *= layout.cp
    heads = _multiple(head_shards, 4)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in own_flags if word.startswith("--")}
    flags = flags_of(layout, techniques) | {
        "dataset": "random",
        "device": "cpu",
        # A ring cuts the sequence into two pieces a rank, so that causal attention is the same work on each.
        "seq_length": _multiple(2 * layout.cp * layout.tp, 128),
    }
    if "global_batch_size" not in names:
        flags["batch_size"] = max(2, layout.pp)
    model = {
        "preset": "debug",
        "n_layers": max(4, layout.pp),
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": 16 * heads,
        "ffn_dim": 40 * heads,
        "vocab_size": 64 * heads,
    }
    # One flag of the model's, and the whole model is the user's own.
    if not names & {*model, "n_experts"}:
        flags |= model
    # A preset has its own number of experts, or none.
    if layout.ep > 1 and "preset" not in names:
        flags["n_experts"] = max(4, 2 * layout.ep)
    return [*in_words({name: value for name, value in flags.items() if name not in names}), *own_flags]
