"""Every flag of the programs under test, read from their dataclasses, command lines made of them, and random layouts
that a problem mostly goes onto."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from mmm.examples import fsdp_tp, parallel_4d
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.run import flags as run_flags
from mmm.run.options import flags_of as values_of
from mmm.trainer import cnn, lm, vit

# The names that cases use.
PROGRAMS: dict[str, ModuleType] = {
    "lm": lm,
    "vit": vit,
    "cnn": cnn,
    "4d": parallel_4d,
    "fsdp_tp": fsdp_tp,
}


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Taken away for the run on one rank: what must not change a number, wherever it stands.
LAYOUT = names(
    "parallel dp_replicate pp dp_shard ep cp tpsize schedule stages_per_rank microbatches cp_style ulysses "
    "activation_checkpointing compile loss_chunks offload reshard_after_forward"
)
# Of the run as such: no number depends on them.
HARMLESS = names(
    "device name outdir overwrite flush_every log_all_ranks timeout save_model workers fingerprints profile "
    "profile_steps checkpoint_mode keep resume deterministic own_work"
)

# What a flag is given on the command line, one text or several.
Value = str | tuple[str, ...]
Flags = Mapping[str, Value]


@dataclass(frozen=True)
class Flag:
    """A flag of a program. choices: of a Literal, ``on`` and ``off`` of a bool; else empty."""

    name: str
    default: Any
    choices: tuple[str, ...]


@cache
def flags_of(program: str) -> dict[str, Flag]:
    """What a user can give, by name."""
    config = PROGRAMS[program].Config()
    flags = {}
    values = values_of(config)
    for name, flag in run_flags.flags(config).items():
        choices = ()
        if isinstance(values[name], bool):
            choices = ("on", "off")
        elif flag.takes.startswith("{"):
            choices = tuple(flag.takes.strip("{}").split(","))
        # A run that is wrong on purpose.
        if name != "break_":
            flags[name] = Flag(name, values[name], choices)
    return flags


def arguments(program: str, flags: Flags) -> list[str]:
    """The command line's words."""
    argv = []
    known = flags_of(program)
    for name, value in flags.items():
        if known[name].choices == ("on", "off"):
            argv.append(f"--{name}" if value == "on" else f"--no-{name}")
        else:
            argv += [f"--{name}", *([value] if isinstance(value, str) else value)]
    return argv


# How many ranks a case has, each as often as it stands here.
RANKS = (1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8)


def draw_layout(rng: random.Random, program: str, flags: Flags) -> tuple[int, dict[str, Value]]:
    """Ranks and flags of a layout that fits the problem, as far as a few rules know; one rank where none is found."""
    for _ in range(60):
        ranks = rng.choice(RANKS)
        axes = _factors(rng, ranks, _axes(program, flags))
        layout = _techniques(rng, program, flags, axes)
        if layout is not None:
            return ranks, layout
    return 1, {}


def _axes(program: str, flags: Flags) -> list[str]:
    """The axes there are to divide ranks over; dp twice, for it is always possible."""
    if program == "fsdp_tp":
        return ["dp", "tp"]
    sequence = program == "lm" or flags.get("model") == "transformer"
    has_cp = sequence or flags.get("model") == "swin"
    return ["dp", "dp", "pp", "tp", *(["cp"] if has_cp else [])]


def _factors(rng: random.Random, ranks: int, axes: list[str]) -> dict[str, int]:
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    for prime in (2, 2, 2, 3, 5, 7):
        if ranks % prime == 0:
            ranks //= prime
            sizes[rng.choice(axes)] *= prime
    return sizes


def _number(flags: Flags, name: str, default: int) -> int:
    return int(str(flags.get(name, default)))


def _techniques(rng: random.Random, program: str, flags: Flags, axes: dict[str, int]) -> dict[str, Value] | None:
    """Flags for these sizes; None where the problem does not go onto them."""
    pp = axes["pp"]
    dp = axes["dp"]
    cp = axes["cp"]
    tp = axes["tp"]
    model = {"lm": "transformer", "fsdp_tp": "transformer", "4d": "transformer"}.get(program, program)
    known, out = flags_of(program), {}
    # batch
    batch = _number(flags, "global_batch_size", 16 * dp)
    if batch % dp:
        return None
    local = batch // dp
    # sizes
    heads = _number(flags, "n_heads", {"transformer": 8, "vit": 4}.get(model, 1))
    seq = _number(flags, "seq_length", 16)
    experts = _number(flags, "n_experts", 0)
    if model != "cnn" and heads % tp:
        return None
    if model == "transformer":
        kv = _number(flags, "n_kv_heads", 4)
        if program == "fsdp_tp" and kv % tp:
            return None
        if seq % (2 * cp * tp) or (kv % tp and tp % kv) or (not experts and _number(flags, "ffn_dim", 192) % tp):
            return None
    if model == "cnn" and tp > 1 and (tp > 4 or tp == 3):
        return None
    if program == "vit" and cp > 1:
        # Rows of windows.
        if _number(flags, "image_size", 0) // (2 * _number(flags, "patch_size", 1)) < cp:
            return None
        out["cp_style"] = "space"
    elif cp > 1 and "cp_style" in known:
        style = rng.choice(("ring", "ulysses", "usp"))
        divisors = [n for n in range(1, cp + 1) if cp % n == 0]
        # Of usp it is any divisor.
        ulysses = {"ring": 1, "ulysses": cp}.get(style) or rng.choice(divisors)
        if ulysses > 1 and heads % (ulysses * tp):
            return None
        out |= {"cp_style": style} | ({"ulysses": str(ulysses)} if style == "usp" else {})
    out |= {name: str(size) for name, size in (("pp", pp), ("cp", cp), ("tpsize", tp)) if size > 1 and name in known}
    # data parallel
    if "parallel" in known:
        out |= _data_parallel(rng, pp * cp * tp, dp)
    one_replica = int(out.get("dp_replicate", 1)) in (0, 1)
    shards = out.get("parallel", "fsdp") in ("fsdp", "zero3", "zero1", "zero2")
    if experts and dp > 1 and "ep" in known and one_replica and shards and rng.random() < 0.7:
        sizes = [n for n in range(1, dp + 1) if dp % n == 0 and experts % n == 0]
        out["ep"] = str(sizes[-1])
    # micro-batches and pipeline
    if pp > 1:
        pipeline = _pipeline(rng, model, flags, pp, local, known["schedule"].choices)
        if pipeline is None or flags["dtype"] == "fp16":
            return None
        out |= pipeline
    elif "microbatches" in known and program != "4d" and rng.random() < 0.3:
        out["microbatches"] = str(min(rng.choice((1, 2, 2, 3, 4, local)), local))
    # memory
    tokens = seq // (cp * tp)
    if "activation_checkpointing" in known and model != "cnn" and rng.random() < 0.3:
        out["activation_checkpointing"] = rng.choice(("full", "selective"))
    if "loss_chunks" in known and rng.random() < 0.25:
        out["loss_chunks"] = str(rng.randint(1, min(4, tokens)))
    if (
        "offload" in known
        and flags["dtype"] != "fp16"
        and flags["optimizer"] != "muon"
        and rng.random() < 0.15
        and out.get("parallel", "fsdp") not in ("ddp", "zero1", "zero2")
    ):
        out["offload"] = "on"
    if "compile" in known and rng.random() < (0.004 if tp * cp == 1 else 0.03):
        out["compile"] = "on"
    sharded = out.get("parallel", "fsdp") in ("fsdp", "zero3", "hsdp")
    if "reshard_after_forward" in known and sharded and rng.random() < 0.2:
        out["reshard_after_forward"] = rng.choice(("always", "never") if pp == 1 else ("auto", "never"))
    return out


def _data_parallel(rng: random.Random, others: int, dp: int) -> dict[str, Value]:
    """How dp coordinates are used, `others` being the ranks of all other axes."""
    if dp > 1 and others == 1 and rng.random() < 0.5:
        kind = rng.choice(("ddp", "zero1", "zero2"))
        return {"parallel": kind} | ({"dp_replicate": str(dp)} if rng.random() < 0.3 else {})
    if others > 1 and rng.random() < 0.3:
        return {"parallel": rng.choice(("zero1", "zero1", "zero2"))}
    replicas = [n for n in range(2, dp + 1) if dp % n == 0]
    if replicas and rng.random() < 0.35:
        count = rng.choice(replicas)
        kind = rng.choice(("hsdp", "hsdp", "fsdp"))
        out: dict[str, Value] = {"parallel": kind, "dp_replicate": str(count)}
        return out | ({"dp_shard": str(dp // count)} if rng.random() < 0.3 else {})
    out = {"parallel": "zero3"} if rng.random() < 0.1 else {}
    return out | ({"dp_shard": str(dp)} if rng.random() < 0.2 else {})


def _pipeline(
    rng: random.Random, model: str, flags: Flags, pp: int, local: int, names: Sequence[str]
) -> dict[str, Value] | None:
    """A schedule whose stages the model has parts for, and whose micro-batches the batch divides into."""
    parts = 4 if model == "cnn" else _number(flags, "n_layers", 4) + 2
    if model != "cnn" and _number(flags, "n_layers", 4) < pp:
        return None
    name = rng.choice(names)
    schedule = SCHEDULES[name]
    most = schedule.max_stages or 3
    stages = [n for n in range(schedule.min_stages, most + 1) if pp * n <= parts]
    least, multiple = schedule.microbatches(pp)
    counts = [m for m in range(least, local + 1) if m % multiple == 0 and local % m == 0]
    if not stages or not counts:
        return None
    out: dict[str, Value] = {} if name == "1F1B" and rng.random() < 0.5 else {"schedule": name}
    if least not in counts or rng.random() < 0.6:
        out["microbatches"] = str(rng.choice(counts[:3]))
    # Not of the example.
    if len(names) > 2 and rng.random() < 0.4:
        out["stages_per_rank"] = str(rng.choice(stages))
    return out
