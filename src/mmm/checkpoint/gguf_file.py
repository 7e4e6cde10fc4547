"""GGUF files, as llama.cpp writes them: sizes, tokenizer and tensors in one, dequantized row by row as they are read.

::

    "GGUF"  version  tensors  keys     uint32, uint32, uint64, uint64
    key, type, value                   for each key: a string, uint32, and what the type says
    name, dims, shape, type, offset    for each tensor: the innermost dim first
    …                                  the tensors, each on a multiple of general.alignment; offsets count from here

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a quantized block means, the package gguf knows.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmm.checkpoint import llama
from mmm.checkpoint.weights import Origins, TensorEntry, Weights
from mmm.errors import CheckpointError

MAGIC, VERSIONS, STRING, ARRAY = b"GGUF", (2, 3), 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
PLAIN = {
    0: (torch.float32, np.int32),
    1: (torch.float16, np.int16),
    30: (torch.bfloat16, np.int16),
}  # by type of tensor
NEUTRAL: dict[str, tuple[Any, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
SCALING = "rope.scaling.type"
READ = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "rope.freq_base", "attention.layer_norm_rms_epsilon", "vocab_size"),
    *("rope.dimension_count", "attention.key_length", "attention.value_length", SCALING, "rope.scaling.factor"),
)
# How a text is split before its bytes are merged, as a pre_tokenizer of the package tokenizers.
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [DIGITS, BYTE_LEVEL],
    "gpt-2": [BYTE_LEVEL],
    "llama-bpe": [
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
CONTROL = 3  # type of a token that stands for no text
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of 3.1 and 3.2
ROPE_FACTORS = "rope_freqs.weight"  # (head_dim / 2): what each frequency of the rotary positions is divided by


class GGUFWeights(Weights):
    """A file's weights. Rows of wq and wk are in the order of this package.

    Raises:
        CheckpointError: it is no such file, of no Llama of this kind, or truncated; or the package gguf is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._header()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is no GGUF file, or is truncated in its header") from None
        self.sizes = self._sizes()
        self.entries = llama.check_entries(self._entries, self.sizes, "gguf", path)
        eos = self.keys.get("tokenizer.ggml.eos_token_id")
        tokenizer, note = self._tokenizer()
        self.origins = Origins(
            self.keys.get("llama.context_length"), () if eos is None else (eos,), tokenizer, (note,) if note else ()
        )

    def _header(self) -> None:
        if self._bytes[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with GGUF")
        self._at = 4
        version, tensors, keys = self._take("I"), self._take("Q"), self._take("Q")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is of GGUF's version {version}, and 2 and 3 are known")
        self.keys: dict[str, Any] = {}
        for _ in range(keys):
            key = self._value(STRING)
            self.keys[key] = self._value(self._take("I"))
        self._entries: dict[str, TensorEntry] = {}
        self._tensors: dict[str, tuple[int, int, int]] = {}  # type, first byte, bytes of a row
        found = []
        for _ in range(tensors):
            name = self._value(STRING)
            shape = tuple(self._take("Q") for _ in range(self._take("I")))[::-1]
            found.append((name, shape, self._take("I"), self._take("Q")))
        aligned = self.keys.get("general.alignment", 32)
        begin = -(-self._at // aligned) * aligned
        for name, shape, kind, offset in found:
            elements, size = self._block(name, kind)
            if not shape or shape[-1] % elements:
                raise CheckpointError(f"{self.path}: {name} has rows of {shape[-1:]}, not of blocks of {elements}")
            row = shape[-1] // elements * size
            if begin + offset + prod(shape[:-1]) * row > len(self._bytes):
                raise CheckpointError(
                    f"{self.path} is truncated: {len(self._bytes):,} bytes end before those of {name}"
                )
            dtype = PLAIN[kind][0] if kind in PLAIN else torch.float32
            self._entries[name], self._tensors[name] = TensorEntry(shape, dtype), (kind, begin + offset, row)

    def _take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            size = self._take("Q")
            self._at += size
            if self._at > len(self._bytes):
                raise ValueError
            return self._bytes[self._at - size : self._at].decode()
        if kind != ARRAY:
            return self._take(SCALARS[kind])
        kind, size = self._take("I"), self._take("Q")
        if kind in SCALARS:
            values = struct.unpack_from(f"<{size}{SCALARS[kind]}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{size}{SCALARS[kind]}")
            return list(values)
        return [self._value(kind) for _ in range(size)]

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """Elements and bytes of a block."""
        if kind in PLAIN:
            return 1, PLAIN[kind][0].itemsize
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{self.path} is quantized, which needs the package gguf, which is not installed: pip install "
                "'mmm[gguf]'"
            ) from None
        try:
            self._kinds = gguf.GGMLQuantizationType
            self._dequantize = gguf.quants.dequantize
            return gguf.GGML_QUANT_SIZES[self._kinds(kind)]
        except (KeyError, ValueError):
            raise CheckpointError(f"{self.path}: {name} is quantized as type {kind}, which is not known") from None

    def _sizes(self) -> dict[str, Any]:
        if (kind := self.keys.get("general.architecture")) != "llama":
            raise CheckpointError(f"{self.path}: the architecture is {kind!r}; llama is the one that is known")
        own = {key.removeprefix("llama."): value for key, value in self.keys.items() if key.startswith("llama.")}
        for key, value in own.items():
            if key in NEUTRAL:
                if value not in NEUTRAL[key]:
                    raise CheckpointError(f"{self.path}: llama.{key} is {value!r}, which is not known")
            elif key not in READ:
                raise CheckpointError(
                    f"{self.path} has the unknown key llama.{key} ({str(value)[:40]}): it may change the computation"
                )
        try:
            vocabulary = self._entries["token_embd.weight"].shape[0]
            sizes = {
                "dim": own["embedding_length"],
                "n_layers": own["block_count"],
                "n_heads": own["attention.head_count"],
                "n_kv_heads": own.get("attention.head_count_kv", own["attention.head_count"]),
                "ffn_dim": own["feed_forward_length"],
                "vocab_size": vocabulary,
                "norm_eps": _short(own["attention.layer_norm_rms_epsilon"]),
                "rope_theta": _short(own.get("rope.freq_base", 10_000.0)),
                "rope_scaling": None,
                "tie_word_embeddings": "output.weight" not in self._entries,
            }
        except KeyError as error:
            raise CheckpointError(f"{self.path} lacks {error.args[0]}") from None
        head_dim = sizes["dim"] // sizes["n_heads"]
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            if own.get(key, head_dim) != head_dim:
                raise CheckpointError(f"{self.path}: llama.{key} is {own[key]}, and a head has {head_dim} elements")
        factor = own.get("rope.scaling.factor")
        kind = own.get(SCALING, "none" if factor is None else "linear")  # as llama.cpp takes it
        if kind == "linear" and type(factor) is float and ROPE_FACTORS not in self._entries:
            sizes["rope_scaling"] = {"rope_type": "linear", "factor": _short(factor)}
        elif kind != "none" or factor is not None:
            raise CheckpointError(f"{self.path}: llama.{SCALING} is {kind!r} with factor {factor}, which is not known")
        if ROPE_FACTORS in self._entries:
            sizes["rope_scaling"] = self._rope_scaling(sizes["rope_theta"], head_dim)
            del self._entries[ROPE_FACTORS]
        return sizes

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """What a config.json says where a GGUF file has factors.

        Raises:
            CheckpointError: they are of no scaling that is known.
        """
        kind, begin, _ = self._tensors[ROPE_FACTORS]
        if kind != 0 or self._entries[ROPE_FACTORS].shape != (head_dim // 2,):
            raise CheckpointError(f"{self.path}: {ROPE_FACTORS} is not {head_dim // 2} numbers of float32")
        factors = torch.from_numpy(np.frombuffer(self._bytes, np.float32, head_dim // 2, begin).astype(np.float64))
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

    def _tokenizer(self) -> tuple[tuple[str, bytes] | None, str]:
        """A tokenizer.json; or None, and why."""
        kind, split = (self.keys.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        tokens, merges = (self.keys.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
        if kind != "gpt2" or split not in SPLITS or not tokens or not merges:
            return None, f"its tokenizer ({kind}, {split}) is none of {', '.join(SPLITS)}: it is not taken along"
        types = self.keys.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        special = [
            {"id": i, "content": token, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i, (token, of) in enumerate(zip(tokens, types, strict=True))
            if of == CONTROL
        ]
        model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
        model |= {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": split == "llama-bpe"}
        about = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[split]},
            "post_processor": None,
            "decoder": BYTE_LEVEL,
            "model": model,
        }
        return ("tokenizer.json", json.dumps(about, ensure_ascii=False).encode()), ""

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        other = llama.name_elsewhere(name, "gguf")
        kind, begin, row = self._tensors[other]
        shape = self._entries[other].shape
        if not prod(length):
            return torch.empty(tuple(length), dtype=self._entries[other].dtype)
        first, many = (start[0], length[0]) if len(shape) > 1 else (0, 1)
        part = np.frombuffer(self._bytes, np.uint8, many * row, begin + first * row).reshape(many, row)
        if kind in PLAIN:
            dtype, bits = PLAIN[kind]
            found = torch.from_numpy(part.copy().view(bits)).view(dtype)
        else:
            found = torch.from_numpy(self._dequantize(part, self._kinds(kind)))
        return found[:, start[-1] : start[-1] + length[-1]].reshape(tuple(length)).contiguous()


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5 of 9.999999747378752e-06."""
    return float(str(np.float32(value)))
