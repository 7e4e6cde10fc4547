"""What the package knows of a model, in one object: ``models/<name>/definition.py`` has it as ``MODEL``.

It is read by the trainers, the planner, the traffic, the proof, and by what reads and writes weights. Nothing outside
of a model's folder names it, or asks of which class its sizes are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm.models.costs import Costs
from mmm.models.names import HuggingFaceNames
from mmm.models.rules import Rules, refuse
from mmm.parallel.plan import Plan, check_axes

NAMES = ("llama", "gpt", "qwen3", "vit", "cnn")


def image_sample(config: Any, batch: int, seq_length: int) -> Tensor:
    """Images, (batch, channels, image_size, image_size)."""
    return torch.zeros(batch, config.channels, config.image_size, config.image_size)


def token_sample(config: Any, batch: int, seq_length: int) -> Tensor:
    """Tokens, (batch, seq_length) int64."""
    return torch.zeros(batch, seq_length, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class ModelDef:
    """A model.

    Attributes:
        name: in flags.
        program: the module that trains it.
        config: its sizes, a frozen dataclass with ``problems()``.
        presets: sizes by name; the first is the default.
        build: sizes → the module, which knows no mesh.
        plan: sizes → how it is sharded.
        rules: (sizes, layout, seq_length, ulysses) → the rules that are broken, name → sentence with the numbers.
        costs: what it keeps in memory and sends, by formula.
        small: sizes that the proof trains, by the name that they have there: few, and awkward. A language model has a
            vocabulary of at least 96 tokens and places for 32; one of images takes 12 × 12 pixels, 1 channel, 10
            classes.
        names: what it is called elsewhere; None where nobody else has it.
        known_by: a size that no other language model has, by which the model of a checkpoint is known; the first of
            `NAMES` needs none.
        sample: (sizes, batch, seq_length) → what forward takes.
        language: whether it predicts tokens.
        tokens: (sizes, seq_length) → length of a sample's sequence, of tokens or patches.
        longest: sizes → the most tokens that a sequence may have, a field ``block_size``; None for any number.
    """

    name: str
    program: str
    config: type
    presets: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    plan: Callable[[Any], Plan]
    rules: Rules
    costs: Costs
    small: Mapping[str, Any]
    names: HuggingFaceNames | None = None
    known_by: str = ""
    sample: Callable[[Any, int, int], Tensor] = token_sample
    language: bool = True
    tokens: Callable[[Any, int], int] = lambda config, seq_length: seq_length
    longest: Callable[[Any], int | None] = lambda config: None

    def sizes(self, preset: str | None, seq_length: int = 0, **changed: Any) -> Any:
        """A preset with other sizes, for sequences of `seq_length` tokens.

        Args:
            preset: None: the default.
            changed: by field; those that are None are as in the preset.

        Raises:
            ConfigError: the model has no such preset, or no such size.
        """
        if preset is not None and preset not in self.presets:
            raise ConfigError(f"--preset {preset} with --model {self.name}: its presets are {', '.join(self.presets)}")
        sizes = self.presets[preset or next(iter(self.presets))]
        if seq_length and self.longest(sizes) is not None:
            changed = {"block_size": seq_length, **changed}
        return self.changed(sizes, **changed)

    def changed(self, sizes: Any, **changed: Any) -> Any:
        """`sizes` with other values; arguments and errors as of the method `sizes`."""
        asked = {name: value for name, value in changed.items() if value is not None}
        known = [field.name for field in fields(self.config)]
        for name, value in asked.items():
            if name not in known:
                raise ConfigError(f"--{name} {value} with --model {self.name}, which has no such size: leave it out")
        if "dim" in asked and "ffn_dim" in known:
            asked = {"ffn_dim": None, **asked}  # follows dim
        return replace(sizes, **asked)

    def on_meta(self, config: Any, batch: int, seq_length: int = 0) -> tuple[nn.Module, Tensor]:
        """The model and what its forward takes, on the meta device."""
        with torch.device("meta"):
            return self.build(config), self.sample(config, batch, seq_length)


@cache
def find(name: str) -> ModelDef:
    """The model of that name. Raises ConfigError: there is none."""
    if name not in NAMES:
        raise ConfigError(f"--model {name}: not known; there are {', '.join(NAMES)}")
    definition: ModelDef = import_module(f"mmm.models.{name}.definition").MODEL
    return definition


def lookup(config: Any) -> ModelDef | None:
    """The model that these sizes are of; None for a model that is not in this package."""
    for name in NAMES:
        definition = find(name)
        if type(config) is definition.config:
            return definition
    return None


def of_config(config: Any) -> ModelDef:
    """As `lookup`. Raises ConfigError: they are of no model here."""
    definition = lookup(config)
    if definition is None:
        raise ConfigError(f"{type(config).__name__}: of no model here; there are {', '.join(NAMES)}")
    return definition


def of_fields(names: Collection[str]) -> ModelDef:
    """The language model whose sizes have these names, among others."""
    for name in NAMES:
        definition = find(name)
        if definition.known_by and definition.known_by in names:
            return definition
    return find(NAMES[0])


def of_model_type(model_type: object) -> ModelDef | None:
    """The model that a config.json with this ``model_type`` is of; None where it is not known."""
    for name in NAMES:
        definition = find(name)
        if definition.names is not None and model_type in definition.names.model_types:
            return definition
    return None


def model_types() -> list[str]:
    """All that `of_model_type` knows."""
    names = [find(name).names for name in NAMES]
    return [kind for own in names if own is not None for kind in own.model_types]


def check_sizes(config: Any, layout: Layout, seq_length: int = 0, ulysses: int = 1) -> None:
    """Raises LayoutError with every rule that sizes break on a layout.

    Args:
        seq_length: in tokens; of a language model.
        ulysses: ranks of cp that shard heads in attention (1: a ring alone).
    """
    definition = of_config(config)
    check_axes(definition.plan(config), layout)
    refuse(definition.rules(config, layout, seq_length, ulysses))
