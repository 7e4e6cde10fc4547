"""Reads what folders of weights keep about texts: the chat template, the special tokens, what each text begins with.

*The chat template* of Hugging Face is in ``chat_template.jinja``. Without that file it is ``chat_template`` of
tokenizer_config.json: a text, or a list of named ones, of which "default" counts.

*The tokens that each text begins with*, such as ``<s>``: a tokenizer.json says it by its post-processor. If that adds
none, ``add_bos_token`` of tokenizer_config.json may ask for one. A SentencePiece model only says which token begins
texts; Llama's tokenizers add it, unless ``add_bos_token`` is false. Source: the tokenizers of Llama in `transformers`,
versions 4 and 5. Where the two differ for a tokenizer.json, version 5 follows the post-processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm.checkpoint.model_metadata import TOKENIZER_CONFIGS, ChatFormat
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file, read_json, short

TEMPLATE = "chat_template.jinja"
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
UNKNOWN = "which token begins a text is not known: "


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read the files of `TOKENIZER_CONFIGS` as one. Raises CheckpointError: one is damaged."""
    config: dict[str, Any] = {}
    for name in TOKENIZER_CONFIGS:
        if (folder / name).exists():
            config |= read_json(folder / name, CheckpointError)
    return config


def chat_format_of(folder: Path) -> ChatFormat | None:
    """Read the chat format of a folder as `transformers` writes it; None if no file says anything.

    Raises:
        CheckpointError: a file is damaged.
    """
    config = tokenizer_config(folder)
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        by_name = {}
        for item in template:
            if isinstance(item, dict):
                by_name[item.get("name")] = item.get("template")
        template = by_name.get("default", "")
    path = folder / TEMPLATE
    if path.exists():
        try:
            template = read_file(path).decode()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
        except UnicodeDecodeError:
            raise CheckpointError(f"{path} cannot be read: it is not UTF-8") from None
    if not isinstance(template, str):
        raise CheckpointError(f"{folder / TOKENIZER_CONFIGS[1]}: chat_template is {short(template)}, which is not text")
    tokens = {}
    for name in NAMES:
        token = _token_in(config, name)
        if isinstance(token, str):
            tokens[name] = token
    if not template and not tokens:
        return None
    return ChatFormat(template, tokens)


def _token_in(config: Mapping[str, Any], name: str) -> Any:
    """A special token: a text, or a mapping that holds one."""
    token = config.get(name)
    if isinstance(token, Mapping):
        return token.get("content")
    return token


def first_tokens(file: tuple[str, bytes], folder: Path) -> tuple[tuple[int, ...], str]:
    """The tokens that each text begins with, and a note if they are not known.

    Args:
        file: name and content of the tokenizer's file.
        folder: the folder of that file.

    Raises:
        CheckpointError: the token that texts should begin with is not in the vocabulary, or a file is damaged.
    """
    config = tokenizer_config(folder)
    add_bos = config.get("add_bos_token")
    name, content = file
    if not name.endswith(".json"):
        if add_bos is False:
            return (), ""
        return _of_sentencepiece(content)
    # This package's own, of characters.
    if content.startswith(b'{"kind": "chars"'):
        return (), ""
    try:
        import tokenizers
    except ImportError:
        return (), f"{UNKNOWN}that needs the package tokenizers, which is not installed"
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # The package raises nothing narrower.
    except Exception:
        raise CheckpointError(f"{folder / name} is not a tokenizer, or is damaged") from None
    # Padding may be on the left, before the tokens in question.
    tokenizer.no_padding()
    encoded = tokenizer.encode("a")
    # 1 for each special token, 0 for those of the text.
    mask = encoded.special_tokens_mask
    before: tuple[int, ...] = ()
    if 0 in mask:
        before = tuple(encoded.ids[: mask.index(0)])
    bos = _token_in(config, "bos_token")
    if before or add_bos is not True or not isinstance(bos, str):
        return before, ""
    token = tokenizer.token_to_id(bos)
    if token is None:
        raise CheckpointError(f"{folder / TOKENIZER_CONFIGS[1]}: bos_token {bos!r} is not in the vocabulary")
    return (token,), ""


def _of_sentencepiece(content: bytes) -> tuple[tuple[int, ...], str]:
    try:
        import sentencepiece
    except ImportError:
        return (), f"{UNKNOWN}that needs the package sentencepiece, which is not installed"
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError:
        return (), f"{UNKNOWN}tokenizer.model is not a SentencePiece model"
    bos = processor.bos_id()
    # -1: the model has no such token.
    if bos < 0:
        return (), ""
    return (bos,), ""
