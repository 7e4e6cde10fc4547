"""The sizes in a Hugging Face config.json, as a Transformer's: of the Llama family, and of what is shaped like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.models.rope import RopeScaling
from mmm.models.transformer import TransformerConfig
from mmm.outside import read_json, short

# Field → its names in the files, the first that is there counts.
NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "n_embd", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "vocab_size": ("vocab_size",),
    "ffn_dim": ("intermediate_size", "n_inner", "ffn_dim"),
    "n_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_dim": ("moe_intermediate_size",),
}
LARGEST = 1_000_000  # of any size
GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "olmo", "olmo2", "phi3", "granite", "smollm3", "yi")


def read_config(path: Path) -> tuple[TransformerConfig, tuple[str, ...], tuple[str, ...]]:
    """A Transformer of the sizes in a config.json, the flags of `mmm.trainer.lm` that make it, and notes.

    Args:
        path: of the file, or of the folder that has it.

    Raises:
        ConfigError: it cannot be read, or has no sizes that a Transformer has.
    """
    file = path / "config.json" if path.is_dir() else path
    data = read_json(file, ConfigError, name=f"--model {path}")
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        value = next((data[name] for name in names if data.get(name) is not None), None)
        if value is not None:
            if type(value) is not int or not 0 <= value <= LARGEST:
                raise ConfigError(
                    f"--model {path}: {field} is {short(value)}, and has to be a whole number from 0 to {LARGEST:,}"
                )
            found[field] = value
    for field in ("dim", "n_layers", "n_heads", "vocab_size"):
        if field not in found:
            raise ConfigError(f"--model {path}: it has none of {', '.join(NAMES[field])}")
    kind, notes = short(data.get("model_type", "")).strip("'"), []
    found.setdefault("n_kv_heads", found["n_heads"])
    if not found.get("n_experts"):
        found = {field: value for field, value in found.items() if field not in ("n_experts", "top_k", "expert_dim")}
    head_dim = data.get("head_dim")
    if type(head_dim) is int and head_dim and head_dim * found["n_heads"] != found["dim"]:
        notes.append(
            f"head_dim {head_dim} is taken as {found['dim']} / {found['n_heads']}: this Transformer has no other"
        )
    if kind not in GATED:
        # Two matrices instead of three: the same number of parameters at two thirds of the width.
        found["ffn_dim"] = found.get("ffn_dim", 4 * found["dim"]) * 2 // 3
        notes.append(f"model_type {kind!r} is taken as a Llama-style Transformer of as many parameters")
    found.setdefault("ffn_dim", 4 * found["dim"])
    flags = [word for field, value in found.items() for word in (f"--{field}", str(value))]
    if data.get("tie_word_embeddings"):
        found["tie_word_embeddings"] = True
        flags.append("--tie_word_embeddings")
    for field, name in (("norm_eps", "rms_norm_eps"), ("rope_theta", "rope_theta")):
        if isinstance(data.get(name), int | float):
            found[field] = float(data[name])
            flags += [f"--{field}", repr(found[field])]
    if isinstance(scaling := data.get("rope_scaling"), dict):
        try:
            found["rope_scaling"] = RopeScaling.of(scaling)
            flags += ["--rope_scaling", json.dumps(scaling)]
        except ValueError as error:
            notes.append(f"rope_scaling is left out: {error}")
    return TransformerConfig(**found), tuple(flags), tuple(notes)
