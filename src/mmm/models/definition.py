"""All that the package knows about a model, in one object: the ``MODEL`` of ``models/<name>/definition.py``.

The trainers, the planner, the traffic formulas, the proof, and what reads and writes weights take it from there.
Nothing outside of a model's folder names the model, or asks for the class of its sizes.
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

# The folders next to this file.
NAMES = ("llama", "gpt", "qwen3", "vit", "swin", "cnn")


def image_sample(config: Any, batch: int, seq_length: int) -> Tensor:
    """Images of zeros, (batch, channels, image_size, image_size)."""
    return torch.zeros(batch, config.channels, config.image_size, config.image_size)


def token_sample(config: Any, batch: int, seq_length: int) -> Tensor:
    """Tokens of zeros, (batch, seq_length) int64."""
    return torch.zeros(batch, seq_length, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class ModelDef:
    """A model of this package.

    Attributes:
        name: the model's name in flags, and of its folder.
        program: the module that trains it, such as ``mmm.trainer.lm``.
        config: class of the model's sizes: a frozen dataclass with a method ``problems()``. Its class attribute
            ``model_name`` is the name.
        presets: sizes by name. The first is the default.
        build: sizes → the module, which knows no mesh.
        plan: sizes → how the model is sharded.
        rules: (sizes, layout, seq_length, ulysses) → the rules that are broken, by name: a sentence with the numbers.
        costs: formulas for what the model keeps in memory and sends.
        small: small and awkward sizes that the proof trains, by their name in the proof. A language model has a
            vocabulary of at least 96 tokens and positions for 32. A model of images takes images of 12 × 12 pixels
            with 1 channel, and has 10 classes.
        names: how Hugging Face's files name the model; None if they do not have it.
        known_by: a field that the sizes of no other language model have. It tells which model a checkpoint is of. The
            first of `NAMES` needs none.
        sample: (sizes, batch, seq_length) → an input for forward.
        language: whether the model predicts tokens.
        tokens: (sizes, seq_length) → length of a sample's sequence, in tokens or patches.
        longest: sizes → the most tokens that a sequence may have, from a field ``block_size``; None for any number.
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
        """The sizes of a preset, changed, for sequences of `seq_length` tokens.

        Args:
            preset: name of a preset. None for the default.
            changed: new values by field. Fields that are None stay as in the preset.

        Raises:
            ConfigError: the model has no such preset, or no such size.
        """
        if preset is not None and preset not in self.presets:
            raise ConfigError(f"--preset {preset} with --model {self.name}: its presets are {', '.join(self.presets)}")
        default = next(iter(self.presets))
        sizes = self.presets[preset or default]
        # A model with learned positions gets one for each token, unless it is told otherwise.
        if seq_length and self.longest(sizes) is not None:
            changed = {"block_size": seq_length, **changed}
        return self.changed(sizes, **changed)

    def changed(self, sizes: Any, **changed: Any) -> Any:
        """`sizes` with other values. Arguments and errors are those of the method `sizes`."""
        asked = {name: value for name, value in changed.items() if value is not None}
        known = [field.name for field in fields(self.config)]
        for name, value in asked.items():
            if name not in known:
                flag = f"--{name} {value}"
                # A switch is given by its name.
                if value is True:
                    flag = f"--{name}"
                raise ConfigError(f"{flag} with --model {self.name}, which has no such size: leave it out")
        if "dim" in asked and "ffn_dim" in known:
            # None lets the width of the feed-forward layer follow dim.
            asked = {"ffn_dim": None, **asked}
        if "n_experts" in asked:
            # A token goes to as many experts as in these sizes, or to 2 where these have none.
            asked = {"top_k": min(sizes.top_k or 2, asked["n_experts"]), **asked}
        return replace(sizes, **asked)

    def on_meta(self, config: Any, batch: int, seq_length: int = 0) -> tuple[nn.Module, Tensor]:
        """The model and an input for its forward, on the meta device: shapes without memory."""
        with torch.device("meta"):
            return self.build(config), self.sample(config, batch, seq_length)


@cache
def find(name: str) -> ModelDef:
    """The model of that name. Raises ConfigError if there is none."""
    if name not in NAMES:
        raise ConfigError(f"--model {name}: not known; there are {', '.join(NAMES)}")
    # Imported only now, so that a program does not import the models that it does not use.
    module = import_module(f"mmm.models.{name}.definition")
    definition: ModelDef = module.MODEL
    return definition


def lookup(config: Any) -> ModelDef | None:
    """The model that these sizes belong to; None if it is not a model of this package."""
    name = getattr(config, "model_name", None)
    if name not in NAMES:
        return None
    return find(name)


def of_config(config: Any) -> ModelDef:
    """As `lookup`. Raises ConfigError if it is not a model of this package."""
    definition = lookup(config)
    if definition is None:
        raise ConfigError(f"{type(config).__name__} does not belong to a model here; there are {', '.join(NAMES)}")
    return definition


def of_fields(names: Collection[str]) -> ModelDef:
    """The language model whose sizes have these fields, found by `ModelDef.known_by`."""
    for name in NAMES:
        definition = find(name)
        if definition.known_by and definition.known_by in names:
            return definition
    return find(NAMES[0])


def of_model_type(model_type: object) -> ModelDef | None:
    """The model that a config.json with this ``model_type`` belongs to; None if it is not known."""
    for name in NAMES:
        definition = find(name)
        if definition.names is not None and model_type in definition.names.model_types:
            return definition
    return None


def model_types() -> list[str]:
    """Every ``model_type`` that `of_model_type` knows."""
    types: list[str] = []
    for name in NAMES:
        names = find(name).names
        if names is not None:
            types += names.model_types
    return types


def check_sizes(config: Any, layout: Layout, seq_length: int = 0, ulysses: int = 1) -> None:
    """Check sizes on a layout.

    Args:
        seq_length: length of a sample in tokens, for a language model.
        ulysses: number of cp ranks that shard the heads of attention; 1 for a ring only.

    Raises:
        LayoutError: sizes break rules. The message has all of them.
    """
    definition = of_config(config)
    check_axes(definition.plan(config), layout)
    refuse(definition.rules(config, layout, seq_length, ulysses))
