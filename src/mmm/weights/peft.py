"""Writes the small matrices of a run with ``--lora`` as an adapter of PEFT: a folder for ``PeftModel.from_pretrained``.

PEFT's names are those of Hugging Face's model, with a prefix::

    layers.0.attention.wq.lora_A.weight    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmm.errors import CheckpointError
from mmm.nn.lora import B
from mmm.weights.hugging_face import new_folder, to_halves
from mmm.weights.no_weights import ADAPTER
from mmm.weights.own import OwnWeights
from mmm.weights.weights import Weights, config_of

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def export_adapter(weights: Weights, folder: Path, dtype: torch.dtype | None, say: Callable[[str], None]) -> None:
    """Write an adapter. The folder gets its name when it is complete.

    Args:
        weights: a checkpoint of a run with ``--lora``.
        folder: folder to make.
        dtype: dtype of the tensors; None keeps theirs.
        say: called with a line for people.

    Raises:
        CheckpointError: the weights have no adapter; or the folder exists.
        RecordError: the folder cannot be written.
    """
    if not isinstance(weights, OwnWeights) or weights.lora is None:
        raise CheckpointError(f"{weights.path} has no adapter: no run with --lora has saved it; leave --adapter out")
    names = weights.definition.names
    assert names is not None
    head_dim = config_of(weights).head_dim
    tensors: dict[str, Tensor] = {}
    for name, own in weights.small.items():
        small = weights.read_small(name)
        small = small.to(dtype or own.dtype)
        # layers.0.attention.wq, lora_A of layers.0.attention.wq.lora_A.weight
        path, letter, _ = name.rsplit(".", 2)
        matrix = f"{path}.weight"
        # (out, rank): B makes the rows of the matrix next to it, and has them in the order that those have.
        if letter == B and names.is_rotated(matrix):
            small = to_halves(small, head_dim)
        name_there = names.there(matrix)
        module = name_there.removesuffix(".weight")
        tensors[f"{PREFIX}{module}.{letter}.weight"] = small
    base = weights.metadata.base
    if base is None:
        say(f"no folder of transformers has the frozen weights: mmm export them, and name the folder in {ADAPTER}")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "target_modules": list(weights.lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(folder) as partial:
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
