"""Every flag of the programs under test, read from their dataclasses, and command lines made of them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

from mmm.examples import fsdp_tp, parallel_4d
from mmm.trainer import cnn, lm, vit
from mmm.trainer.config.run import flag_fields

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
    "profile_steps checkpoint_mode keep resume"
)

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
    hints = typing.get_type_hints(type(config), include_extras=True)
    for group in vars(config).values():
        if is_dataclass(group):
            hints |= typing.get_type_hints(type(group), include_extras=True)
    found = {}
    for field, default in flag_fields(config):
        hint = hints[field.name]
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        if field.name != "break_":  # a run that is wrong on purpose
            found[field.name] = Flag(field.name, default, _choices(hint))
    return found


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("on", "off")
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def arguments(program: str, flags: Flags) -> list[str]:
    """The command line's words."""
    words = []
    known = flags_of(program)
    for name, value in flags.items():
        if known[name].choices == ("on", "off"):
            words.append(f"--{name}" if value == "on" else f"--no-{name}")
        else:
            words += [f"--{name}", *([value] if isinstance(value, str) else value)]
    return words
