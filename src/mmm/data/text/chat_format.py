"""The chat template of a tokenizer, and the names of its special tokens, as others keep them beside weights.

Hugging Face: ``chat_template.jinja``; without it ``chat_template`` of tokenizer_config.json, a text or a list of named
ones, of which "default" counts.

And the tokens that a folder has each text begin with, such as ``<s>``. A tokenizer.json says it by its post-processor;
where that adds none, ``add_bos_token`` of tokenizer_config.json may. A SentencePiece model says only which token begins
texts: a Llama's are given it, unless ``add_bos_token`` is false. Source: the tokenizers of Llama in `transformers`,
versions 4 and 5; where they differ for a tokenizer.json, 5 goes by the post-processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file, read_json, short

TEMPLATE = "chat_template.jinja"
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one counts
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
UNKNOWN = "which token begins a text is not known: "


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read what the files of `CONFIGS` say. Raises CheckpointError: one is damaged."""
    config: dict[str, Any] = {}
    for name in CONFIGS:
        if (folder / name).exists():
            config |= read_json(folder / name, CheckpointError)
    return config


def chat_format_of(folder: Path) -> ChatFormat | None:
    """Of a folder as `transformers` writes it; None where no file says anything. Raises CheckpointError: one is
    damaged."""
    config = tokenizer_config(folder)
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default", "")
    path = folder / TEMPLATE
    if path.exists():
        try:
            template = read_file(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not UTF-8"
            raise CheckpointError(f"{path} cannot be read: {why}") from None
    if not isinstance(template, str):
        raise CheckpointError(f"{folder / CONFIGS[1]}: chat_template is {short(template)}, which is no text")
    tokens = {}
    for name in NAMES:
        token = _token_in(config, name)
        if isinstance(token, str):
            tokens[name] = token
    return ChatFormat(template, tokens) if template or tokens else None


def _token_in(config: Mapping[str, Any], name: str) -> Any:
    """A special token, which is a text, or a mapping that has one."""
    token = config.get(name)
    return token.get("content") if isinstance(token, Mapping) else token


def first_tokens(file: tuple[str, bytes], folder: Path) -> tuple[tuple[int, ...], str]:
    """The tokens that each text begins with; and a note where they are not known.

    Args:
        file: name and content of the tokenizer. folder: that it is in.

    Raises:
        CheckpointError: the token that texts are to begin with is not in the vocabulary, or the file is damaged.
    """
    config = tokenizer_config(folder)
    add_bos = config.get("add_bos_token")
    name, content = file
    if not name.endswith(".json"):
        return ((), "") if add_bos is False else _of_sentencepiece(content)
    if content.startswith(b'{"kind": "chars"'):  # this package's own
        return (), ""
    try:
        import tokenizers
    except ImportError:
        return (), f"{UNKNOWN}that needs the package tokenizers, which is not installed"
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception:  # the package raises nothing narrower
        raise CheckpointError(f"{folder / name} is no tokenizer, or is damaged") from None
    tokenizer.no_padding()  # it may be on the left
    encoded = tokenizer.encode("a")
    mask = encoded.special_tokens_mask
    before = tuple(encoded.ids[: mask.index(0)]) if 0 in mask else ()
    bos = _token_in(config, "bos_token")
    if before or add_bos is not True or not isinstance(bos, str):
        return before, ""
    token = tokenizer.token_to_id(bos)
    if token is None:
        raise CheckpointError(f"{folder / CONFIGS[1]}: bos_token {bos!r} is not in the vocabulary")
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
        return (), f"{UNKNOWN}tokenizer.model is no SentencePiece model"
    bos = processor.bos_id()
    return () if bos < 0 else (bos,), ""
