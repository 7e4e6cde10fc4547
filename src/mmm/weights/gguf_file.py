"""The weights in a GGUF file, or in its parts: sizes, tokenizer and tensors in one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.errors import CheckpointError
from mmm.outside import short
from mmm.weights import llama
from mmm.weights.chat_format import chat_format_of_gguf
from mmm.weights.gguf_format import open_parts
from mmm.weights.gguf_tokenizer import GGUFTokenizer
from mmm.weights.llama_keys import note_of, unknown_keys
from mmm.weights.weights import Weights

ARCHITECTURE = "llama."  # what its keys begin with
COUNTS = {  # fields of TransformerConfig, and their keys
    "dim": "embedding_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "ffn_dim": "feed_forward_length",
}
READ = (
    *COUNTS.values(),
    *("context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon", "vocab_size"),
    *("rope.dimension_count", "attention.key_length", "attention.value_length"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
)
# Keys that must have one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "attention.sliding_window", "attention.scale"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (1, 0)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
# Keys that say nothing where the scaling is none, or linear.
OF_YARN = tuple(
    f"rope.scaling.{key}"
    for key in ("original_context_length", "finetuned", "yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow")
)
UNSCALED = (None, 0, 1)  # factors that scale nothing
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of 3.1 and 3.2
ROPE_FACTORS = "rope_freqs.weight"  # (head_dim / 2): what each frequency of the rotary positions is divided by


class GGUFWeights(Weights):
    """The weights of a file, or of all parts of which it is one. Rows of wq and wk are in the order of this package.

    Raises:
        CheckpointError: it is no such file, of no Llama of this kind, or truncated; a part or the package gguf is
            missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = open_parts(path)
        self.keys = files[0].keys
        self._file = {name: file for file in files for name in file.entries}
        self._entries = {name: file.entries[name] for name, file in self._file.items()}
        self.sizes, passed_over = self._sizes()
        self.entries = llama.check_entries(self._entries, self.sizes, llama.gguf_name, path)
        tokenizer = GGUFTokenizer(self.keys, path)
        notes = (*note_of(passed_over), *tokenizer.notes)
        block = self.keys.get(f"{ARCHITECTURE}context_length")
        chat = None if tokenizer.file is None else chat_format_of_gguf(self.keys, path)
        self.metadata = ModelMetadata(block, tokenizer.eos, tokenizer.file, notes, tokenizer.bos, chat)

    def _sizes(self) -> tuple[dict[str, Any], list[str]]:
        """Fields of ``TransformerConfig``, and the keys that are passed over."""
        if (kind := self.keys.get("general.architecture")) != "llama":
            raise CheckpointError(f"{self.path}: the architecture is {short(kind)}; llama is the one that is known")
        keys = {key: value for key, value in self.keys.items() if key.startswith(ARCHITECTURE)}
        own = {key.removeprefix(ARCHITECTURE): value for key, value in keys.items()}
        passed_over = unknown_keys(own, {*READ, *OF_YARN}, NEUTRAL, self.path, ARCHITECTURE)
        passed_over += [f"{ARCHITECTURE}{key}" for key in OF_YARN if key in own]
        own.setdefault("attention.head_count_kv", own.get("attention.head_count"))
        own.setdefault("rope.freq_base", 10_000.0)
        try:
            vocabulary = self._entries["token_embd.weight"].shape[0]
            sizes: dict[str, Any] = {
                **{field: self._count(own, key) for field, key in COUNTS.items()},
                "vocab_size": vocabulary,
                "norm_eps": self._number(own, "attention.layer_norm_rms_epsilon"),
                "rope_theta": self._number(own, "rope.freq_base"),
                "rope_scaling": None,
                "tie_word_embeddings": "output.weight" not in self._entries,
            }
        except KeyError as error:
            raise CheckpointError(f"{self.path} lacks {error.args[0]}") from None
        if "context_length" in own:
            self._count(own, "context_length")
        head_dim = sizes["dim"] // sizes["n_heads"]
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            if own.get(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self.path}: llama.{key} is {short(own[key])}, and a head has {head_dim} elements"
                )
        sizes["rope_scaling"] = self._linear(own)
        if ROPE_FACTORS in self._entries:
            sizes["rope_scaling"] = self._rope_scaling(sizes["rope_theta"], head_dim)
            del self._entries[ROPE_FACTORS]
        return sizes, passed_over

    def _count(self, own: dict[str, Any], key: str) -> int:
        if type(own[key]) is not int or own[key] < 1:
            raise CheckpointError(
                f"{self.path}: {ARCHITECTURE}{key} is {short(own[key])}, which is no number of anything"
            )
        return own[key]

    def _number(self, own: dict[str, Any], key: str) -> float:
        if type(own[key]) not in (int, float):
            raise CheckpointError(f"{self.path}: {ARCHITECTURE}{key} is {short(own[key])}, which is no number")
        return _short(own[key])

    def _linear(self, own: dict[str, Any]) -> dict[str, Any] | None:
        """The scaling that the keys say, as llama.cpp takes them: a factor is ``linear`` where no type is said, and of
        no effect where that is ``none``; a factor of 1, or none, scales nothing.

        Raises:
            CheckpointError: another scaling.
        """
        kind = own.get("rope.scaling.type", "linear")
        factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
        if kind == "none" or (kind in ("linear", "yarn") and factor in UNSCALED):
            return None
        if kind == "linear" and type(factor) is float and ROPE_FACTORS not in self._entries:
            return {"rope_type": "linear", "factor": _short(factor)}
        raise CheckpointError(
            f"{self.path}: llama.rope.scaling.type is {short(kind)} with factor {short(factor)}, which is not known"
        )

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """What a config.json says where a GGUF file has factors.

        Raises:
            CheckpointError: they are of no scaling that is known.
        """
        entry = self._entries[ROPE_FACTORS]
        if entry.dtype != torch.float32 or entry.shape != (head_dim // 2,):
            raise CheckpointError(f"{self.path}: {ROPE_FACTORS} is not {head_dim // 2} numbers of float32")
        factors = self._file[ROPE_FACTORS].read(ROPE_FACTORS, (0,), entry.shape).double()
        factor = _short(factors.max().item())
        for scaling in (
            {"rope_type": "linear", "factor": factor},
            {"rope_type": "llama3", "factor": factor, **LLAMA_3},
        ):
            if torch.allclose(llama.rope_divisors(scaling, theta, head_dim), factors, rtol=1e-5):
                return scaling if factor != 1 else None
        raise CheckpointError(
            f"{self.path}: the factors of {ROPE_FACTORS}, up to {factor}, are of no scaling that is known: linear, or "
            "llama3 with the numbers of Llama 3.1"
        )

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        other = llama.gguf_name(name)
        return self._file[other].read(other, start, length)


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5 of 9.999999747378752e-06."""
    return float(str(np.float32(value)))
