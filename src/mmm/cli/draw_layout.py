"""From the name of a layout to a small language model on it: the flags of ``mmm.trainer.lm``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmm.errors import ConfigError
from mmm.layout import AXES

SEPARATORS = r"[·,.*\s]+"
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
STYLES = ("ring", "ulysses", "usp")  # of cp
SMALL = ("--preset", "--n_layers", "--n_heads", "--n_kv_heads", "--dim", "--ffn_dim", "--vocab_size", "--n_experts")
MOST = 2**20  # ranks
HELP = "such as dp2·tp2, pp2.dp2.tp2, fsdp4, zero1, hsdp, cp4, ulysses4, dp4.ep2; zero1:8 is ZeRO-1 on 8 ranks"


@dataclass
class NamedLayout:
    """A layout by its name.

    Attributes:
        sizes: of each axis. technique: of data parallel; empty where the name has none. cp_style: empty for the usual.
    """

    text: str
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*AXES, "ep"), 1))
    technique: str = ""
    cp_style: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes[axis] for axis in AXES)


def layout_of(text: str) -> NamedLayout:
    """A name taken apart. Raises ConfigError: it is none."""
    found, given = NamedLayout(text), set[str]()
    for word in re.split(SEPARATORS, text.strip()):
        if word == "1":
            continue
        match = re.fullmatch(rf"({'|'.join(TECHNIQUES)})[:=]?(\d{{,99}})|([a-z_]+?)=?(\d{{1,99}})", word)
        if match is None:
            raise ConfigError(f"layout {text}: {word!r} is no axis with its size: {HELP}{_near(word)}")
        technique, of_technique, axis, count = match.groups()
        size = int(of_technique or count or 0)
        if (of_technique or count) and not 1 <= size <= MOST:
            raise ConfigError(f"layout {text}: {word}: an axis has 1 to {MOST:,} ranks")
        if technique:
            axis = "dp_shard"
            if found.technique:
                raise ConfigError(f"layout {text} has {found.technique} and {technique}: give one of them")
            found.technique = technique
        elif axis in STYLES:
            found.cp_style, axis = axis, "cp"
        axis = {"dp": "dp_shard"}.get(axis, axis)
        if axis not in found.sizes:
            raise ConfigError(f"layout {text}: {word!r} is no axis with its size: {HELP}{_near(word)}")
        if size and axis in given:
            raise ConfigError(f"layout {text} has {axis} twice: give each axis once")
        if size:
            given.add(axis)
            found.sizes[axis] = size
    _fill_in(found, given)
    return found


def looks_like_one(text: str) -> bool:
    """Whether a part of the text is an axis with its size, or a technique: no module is called so."""
    return any(re.fullmatch(rf"({'|'.join(TECHNIQUES)})|[a-z_]+\d+|\d+", word) for word in re.split(SEPARATORS, text))


def _fill_in(found: NamedLayout, given: set[str]) -> None:
    """A technique without a number is on 4 ranks, or on those that the name gives data parallel."""
    if found.technique and not given & {"dp_shard", "dp_replicate"}:
        found.sizes["dp_shard"] = 4
    if found.technique == "hsdp" and "dp_replicate" not in given:
        if found.sizes["dp_shard"] % 2:
            raise ConfigError(f"layout {found.text}: hsdp has two replicas, and {found.sizes['dp_shard']} is odd")
        found.sizes["dp_replicate"], found.sizes["dp_shard"] = 2, found.sizes["dp_shard"] // 2
    if found.ranks > MOST:
        raise ConfigError(f"layout {found.text} has {found.ranks:,} ranks: at most {MOST:,} are drawn")


def _near(word: str) -> str:
    name = re.sub(r"\W|\d", "", word)
    if name == word and name:
        return f". How many ranks, such as {name}2?"
    near = difflib.get_close_matches(name, [*AXES, "dp", "ep", "ddp", "fsdp", "hsdp", "zero1", *STYLES], 1)
    return f". Did you mean {near[0]}?" if near else ""


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of


def trainer_flags(layout: NamedLayout, given: Sequence[str]) -> list[str]:
    """Flags of ``mmm.trainer.lm``: of the layout, and of a model small enough to be drawn that goes with it.

    Args:
        given: by the user, which count instead.
    """
    sizes = layout.sizes
    flags = {f"--{axis}": size for axis, size in sizes.items() if size > 1 and axis not in ("dp_shard", "tp")}
    flags |= {"--tpsize": sizes["tp"]} if sizes["tp"] > 1 else {}
    by_heads = sizes["tp"] * (sizes["cp"] if layout.cp_style in ("ulysses", "usp") else 1)
    heads, pieces = _multiple(by_heads, 4), 2 * sizes["cp"] * sizes["tp"]
    wanted = {
        "--parallel": layout.technique or ("hsdp" if sizes["dp_replicate"] > 1 else "fsdp"),
        **({"--cp_style": layout.cp_style} if layout.cp_style else {}),
        **({"--ulysses": 2} if layout.cp_style == "usp" else {}),
        "--dataset": "random",
        "--device": "cpu",
        "--seq_length": _multiple(pieces, 128),
        "--batch_size": max(2, sizes["pp"]),
    }
    model = {
        "--preset": "debug",
        "--n_layers": max(4, sizes["pp"]),
        "--n_heads": heads,
        "--n_kv_heads": heads,
        "--dim": 16 * heads,
        "--ffn_dim": 40 * heads,
        "--vocab_size": 64 * heads,
        **({"--n_experts": max(4, 2 * sizes["ep"])} if sizes["ep"] > 1 else {}),
    }
    names = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in given if word.startswith("--")}
    own = {} if names & set(SMALL) else model
    if "--n_experts" in model and "--n_experts" not in names:
        own["--n_experts"] = model["--n_experts"]
    replaced = {"--batch_size"} if "--global_batch_size" in names else set()
    every = {**flags, **wanted, **own}
    return [str(w) for flag, value in every.items() if flag not in names | replaced for w in (flag, value)] + [*given]
