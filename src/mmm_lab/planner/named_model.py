"""The model that ``--model`` names: a preset, or a Llama's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmm.errors import CheckpointError, ConfigError
from mmm.models.gpt import model as gpt
from mmm.models.llama import model as transformer
from mmm.models.llama.model import TransformerConfig
from mmm.models.vit import model as vit
from mmm.nn.rope import RopeScaling
from mmm.outside import read_json
from mmm.weights import llama_keys
from mmm_lab.planner.models import model_spec
from mmm_lab.planner.spec import ModelSpec
from mmm_launch.errors import did_you_mean

LARGEST = 1_000_000  # of any size
MOST_LAYERS = 1000  # how they are split over stages takes a minute
SIZES = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "n_experts", "top_k", "expert_dim")


def read_model(name: str, sizes: Mapping[str, int | None], seq_length: int, tie: bool = False) -> ModelSpec:
    """The model that ``--model`` names.

    Args:
        name: a preset of the Transformer; ``gpt``, ``gpt-shakespeare`` …; ``vit``, ``vit-base`` …; the path
            of a Llama's config.json, as Hugging Face has it. sizes: those of `SIZES` that the command line changes.

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
        if is_file:
            config, flags = _hugging_face(Path(name))
        else:
            config = transformer.PRESETS[name]
        return _transformer(name, config, given, seq_length, tie, flags)
    if given or tie:
        what = next(iter(given), "tie_word_embeddings")
        raise ConfigError(f"--{what} with --model {name}: it changes presets of the Transformer alone; leave it out")
    base, _, size = name.partition("-")
    if base == "vit" and (size or "large") in vit.PRESETS:
        preset = size or "large"
        return replace(model_spec(vit.PRESETS[preset]), name=name, flags=("--preset", preset))
    if base == "gpt" and (size or "gpt2") in gpt.PRESETS:
        preset = size or "gpt2"
        sizes_of_gpt = replace(gpt.PRESETS[preset], block_size=seq_length)  # as the trainer's
        own = ("--model", "gpt", "--preset", preset, "--vocab_size", str(sizes_of_gpt.vocab_size))
        return replace(model_spec(sizes_of_gpt, seq_length), name=name, flags=own)
    known = [
        *transformer.PRESETS,
        *(f"gpt-{size}" for size in gpt.PRESETS),
        *(f"vit-{size}" for size in vit.PRESETS),
    ]
    hint = did_you_mean(name, known) or f" There are {', '.join(known)}, and the config.json of a Llama"
    raise ConfigError(f"--model {name}: not known.{hint}")


def _transformer(
    name: str,
    config: TransformerConfig,
    given: Mapping[str, int],
    seq_length: int,
    tie: bool,
    flags: tuple[str, ...],
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
    return replace(model_spec(config, seq_length), name=name, flags=flags)


def _hugging_face(path: Path) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The Transformer of a Llama's config.json, or of the folder that has it, and the flags of `mmm.trainer.lm` that
    make it."""
    file = path / "config.json" if path.is_dir() else path
    data = read_json(file, ConfigError, name=f"--model {path}")
    try:
        sizes, _ = llama_keys.sizes_of(data, file)
    except CheckpointError as error:
        raise ConfigError(f"--model {path}: {error}") from None
    flags = []
    for name, value in sizes.items():
        if name == "tie_word_embeddings":
            flags += ["--tie_word_embeddings"] if value else []
        elif name == "rope_scaling":
            flags += ["--rope_scaling", json.dumps(value)] if value else []
        else:
            flags += [f"--{name}", repr(value)]
        if isinstance(value, int) and value > LARGEST:
            raise ConfigError(f"--model {path}: {name} is {value}; it must be at most {LARGEST:,}")
    try:
        sizes["rope_scaling"] = RopeScaling.of(sizes["rope_scaling"]) if sizes["rope_scaling"] else None
    except ValueError as error:
        raise ConfigError(f"--model {path}: rope_scaling: {error}") from None
    return TransformerConfig(**sizes), tuple(flags)
