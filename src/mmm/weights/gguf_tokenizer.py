"""The tokenizer in a GGUF file: a tokenizer.json of it, the tokens that begin and end a text.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what holds where a file says nothing, llama.cpp.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmm.errors import CheckpointError

# How a text is split before its bytes are merged, as a pre_tokenizer of the package tokenizers.
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA_3 = "llama-bpe"
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [DIGITS, BYTE_LEVEL],
    "gpt-2": [BYTE_LEVEL],
    LLAMA_3: [
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
        if not self._own.get("add_bos_token", kind == "llama" or split == LLAMA_3):
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
        model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": split == LLAMA_3}
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
