"""The model that ``--model`` names: a preset, a Hugging Face config.json, a user's own module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from mmm.errors import ConfigError, UserError
from mmm.models import gpt, transformer, vit
from mmm.models.cnn import CNNConfig
from mmm.models.meta import meta_parameters
from mmm.models.transformer import TransformerConfig
from mmm_lab.planner.hugging_face import LARGEST, read_config
from mmm_lab.planner.image_models import cnn_spec, vit_spec
from mmm_lab.planner.models import language_spec
from mmm_lab.planner.spec import Matrix, ModelSpec, PartKind
from mmm_verify import errors as verify_errors
from mmm_verify.subject import load_function

MOST_LAYERS = 1000  # how they are split over stages takes a minute
SIZES = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "n_experts", "top_k", "expert_dim")


def read_model(name: str, sizes: Mapping[str, int | None], seq_length: int, tie: bool = False) -> ModelSpec:
    """The model that ``--model`` names.

    Args:
        name: a preset of the Transformer; ``gpt``, ``gpt-shakespeare`` …; ``vit``, ``vit-base`` …; ``cnn``; the path
            of a Hugging Face config.json; or ``module:factory``. sizes: those of `SIZES` that the command line changes.

    Raises:
        ConfigError: no such model, or sizes that do not fit together.
    """
    given = {key: value for key, value in sizes.items() if value is not None}
    for key, value in given.items():
        if not 0 <= value <= LARGEST:
            raise ConfigError(f"--{key} {value}: it must be from 0 to {LARGEST:,}")
    is_file = name.endswith(".json") or Path(name).is_dir()
    if is_file or name in transformer.PRESETS:
        flags: tuple[str, ...] = ("--preset", name)
        notes: tuple[str, ...] = ()
        if is_file:
            config, flags, notes = read_config(Path(name))
        else:
            config = transformer.PRESETS[name]
        return _transformer(name, config, given, seq_length, tie, flags, notes)
    if given or tie:
        what = next(iter(given), "tie_word_embeddings")
        raise ConfigError(f"--{what} with --model {name}: it changes presets of the Transformer alone; leave it out")
    base, _, size = name.partition("-")
    if base == "vit" and (size or "large") in vit.PRESETS:
        preset = size or "large"
        return replace(vit_spec(vit.PRESETS[preset]), name=name, flags=("--preset", preset))
    if base == "gpt" and (size or "gpt2") in gpt.PRESETS:
        preset = size or "gpt2"
        sizes_of_gpt = replace(gpt.PRESETS[preset], block_size=seq_length)  # as the trainer's
        own = ("--model", "gpt", "--preset", preset, "--vocab_size", str(sizes_of_gpt.vocab_size))
        return replace(language_spec(sizes_of_gpt, seq_length), name=name, flags=own)
    if name == "cnn":
        return cnn_spec(CNNConfig())
    if ":" in name:
        return _factory(name)
    known = [
        *transformer.PRESETS,
        *(f"gpt-{size}" for size in gpt.PRESETS),
        *(f"vit-{size}" for size in vit.PRESETS),
        "cnn",
    ]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}, a config.json, and MODULE:FACTORY"
    raise ConfigError(f"--model {name}: not known; {hint}")


def _transformer(
    name: str,
    config: TransformerConfig,
    given: Mapping[str, int],
    seq_length: int,
    tie: bool,
    flags: tuple[str, ...],
    notes: tuple[str, ...],
) -> ModelSpec:
    changes: dict[str, Any] = dict(given)
    if "dim" in given and "ffn_dim" not in given:
        changes["ffn_dim"] = None  # follows dim, as in the trainers
    if given.get("n_experts") and "top_k" not in given:
        changes["top_k"] = min(2, given["n_experts"])
    if tie:
        changes["tie_word_embeddings"] = True
    config = replace(config, **changes)
    if wrong := config.problems():
        raise ConfigError(f"--model {name}: {'; '.join(wrong)}")
    if config.n_layers > MOST_LAYERS:
        raise ConfigError(f"--model {name}: {config.n_layers:,} layers; up to {MOST_LAYERS:,} are planned")
    if config.n_experts and config.n_experts * config.n_layers > LARGEST:
        raise ConfigError(f"--n_experts {config.n_experts} in {config.n_layers} layers: that is no model")
    flags += tuple(word for key, value in given.items() for word in (f"--{key}", str(value)))
    flags += ("--tie_word_embeddings",) if tie else ()
    if "--vocab_size" not in flags:  # else the trainer takes that of its text
        flags += ("--vocab_size", str(config.vocab_size))
    return replace(language_spec(config, seq_length), name=name, flags=flags, notes=notes)


def _factory(name: str) -> ModelSpec:
    """A user's module: its parameters by the parts that its longest list of layers has; data parallelism alone."""
    try:
        make = load_function(name, "--model")
    except verify_errors.ConfigError as error:
        raise ConfigError(error) from None
    try:
        with meta_parameters(keep_values=False):
            model = make()
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"--model {name}: {type(error).__name__}: {error}") from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name}: it returns {type(model).__name__}, and has to return an nn.Module")
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(m) > 1]
    layers = list(max(lists, key=len).children()) if lists else []
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = tuple(Matrix(tuple(p.shape)) for p in model.parameters() if id(p) not in inside)
    alike: dict[tuple[tuple[int, ...], ...], int] = {(): 0}
    sequence = [0]
    for layer in layers:
        key = tuple(tuple(parameter.shape) for parameter in layer.parameters())
        sequence.append(alike.setdefault(key, len(alike)))
    shapes = [rest, *(tuple(Matrix(shape) for shape in key) for key in list(alike)[1:])]
    # 2 FLOPs a weight and sample, as if each were used once: a lower bound where weights are shared over positions.
    kinds = tuple(
        PartKind("module", group, 2 * sum(math.prod(m.shape) for m in group if len(m.shape) > 1)) for group in shapes
    )
    if not sum(kind.parameters for kind in kinds):
        raise ConfigError(f"--model {name}: it has no parameters")
    notes = (
        "activations of this model are not known: memory is that of parameters, gradients, optimizer and buffers alone",
        "its FLOPs are counted as 2 a weight and sample, so that step times are lower bounds",
    )
    return ModelSpec(
        name=name,
        plan=None,
        config=None,
        kinds=kinds,
        sequence=tuple(sequence),
        tied=False,
        tokens=1,
        seq_length=0,
        notes=notes,
    )
