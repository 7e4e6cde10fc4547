"""The weights in a GGUF file, or in its parts: sizes, tokenizer and tensors in one.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what holds where a file says nothing, llama.cpp.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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


# How a text is split before its bytes are merged, as a pre_tokenizer of the package tokenizers.
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA_BPE = "llama-bpe"
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [DIGITS, BYTE_LEVEL],
    "gpt-2": [BYTE_LEVEL],
    LLAMA_BPE: [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        BYTE_LEVEL | {"use_regex": False},
    ],
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens: one that stands for no text, one that is never split
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, of a message
PREFIX = "tokenizer.ggml."
KINDS = {"tokens": str, "merges": str, "token_type": int}  # of a list's elements


class GGUFTokenizer:
    """
    Attributes:
        file: name and content of a tokenizer.json; None where the tokenizer is of a kind that is not taken along.
        bos, eos: as of `ModelMetadata`. notes: for people.

    Raises:
        CheckpointError: a key has another type than it must, too few values, or a token twice.
    """

    def __init__(self, keys: Mapping[str, Any], where: object) -> None:
        """
        Args:
            keys: of the file, all of them. where: its name, for messages.
        """
        self._own = {key.removeprefix(PREFIX): value for key, value in keys.items() if key.startswith(PREFIX)}
        self._where, self.notes = where, list[str]()
        for key, kind in KINDS.items():
            values = self._own.get(key, [])
            if not isinstance(values, list) or any(type(value) is not kind for value in values):
                raise CheckpointError(f"{where}: {PREFIX}{key} is no list of {kind.__name__}")
        tokens, types = self._own.get("tokens", []), self._own.get("token_type")
        if types is not None and len(types) < len(tokens):
            raise CheckpointError(
                f"{where}: {PREFIX}token_type has {len(types)} values, and there are {len(tokens)} tokens"
            )
        if twice := [token for token, times in Counter(tokens).items() if times > 1]:
            raise CheckpointError(f"{where}: {PREFIX}tokens has {twice[0]!r} twice")
        self.eos = tuple(dict.fromkeys(token for key in ENDS if (token := self._token(key)) is not None))
        self.bos = self._begin()
        self.file = self._json()

    def _token(self, key: str) -> int | None:
        token, tokens = self._own.get(key), self._own.get("tokens")
        if token is not None and type(token) is not int:
            raise CheckpointError(f"{self._where}: {PREFIX}{key} is {token!r}, which is no token")
        if token is not None and tokens and not 0 <= token < len(tokens):  # llama.cpp warns, too
            self.notes.append(f"passed over: {PREFIX}{key} is {token}, and there are {len(tokens)} tokens")
            return None
        return token

    def _begin(self) -> tuple[int, ...]:
        kind, split = self._own.get("model"), self._own.get("pre")
        token = self._token("bos_token_id")
        if kind == "llama" and token is None:
            token = 1  # SentencePiece's
        if not self._own.get("add_bos_token", kind == "llama" or split == LLAMA_BPE):
            return ()
        if token is None:
            self.notes.append(f"{PREFIX}bos_token_id is not there: texts begin without one")
            return ()
        return (token,)

    def _json(self) -> tuple[str, bytes] | None:
        kind, split = self._own.get("model"), self._own.get("pre")
        tokens, merges = self._own.get("tokens"), self._own.get("merges")
        if kind != "gpt2" or split not in SPLITS or not tokens or not merges:
            self.notes.append(f"its tokenizer ({kind}, {split}) is none of {', '.join(SPLITS)}: it is not taken along")
            return None
        types = self._own.get("token_type") or [1] * len(tokens)
        added = [
            {"id": i, "content": token, "special": of == CONTROL, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i, (token, of) in enumerate(zip(tokens, types, strict=False))
            if of in (CONTROL, USER_DEFINED)
        ]
        model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
        model |= {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": split == LLAMA_BPE}
        about = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[split]},
            "post_processor": self._template([tokens[i] for i in self.bos]),
            "decoder": BYTE_LEVEL,
            "model": model,
        }
        return "tokenizer.json", json.dumps(about, ensure_ascii=False).encode()

    def _template(self, first: list[str]) -> dict[str, Any] | None:
        """What begins each text with these tokens, for other programs that read the tokenizer.json."""
        if not first:
            return None
        one, two = ([{"Sequence": {"id": name, "type_id": i}}] for i, name in enumerate("AB"))
        begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name in first]
        special = {
            name: {"id": name, "ids": [token], "tokens": [name]} for name, token in zip(first, self.bos, strict=True)
        }
        return {
            "type": "TemplateProcessing",
            "single": begin + one,
            "pair": begin + one + two,
            "special_tokens": special,
        }
