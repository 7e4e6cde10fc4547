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
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import CheckpointError
from mmm.outside import read_file, read_json, short

TEMPLATE = "chat_template.jinja"
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


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
        named = [item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0] if named else ""
    path = folder / TEMPLATE
    if path.exists():
        try:
            template = read_file(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
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


def first_tokens(tokenizer: Tokenizer, folder: Path) -> tuple[int, ...]:
    """The tokens that each text begins with.

    Args:
        tokenizer: the tokenizer of the folder.
        folder: a folder as `transformers` writes it.

    Raises:
        ConfigError: the token that texts should begin with is not in the vocabulary.
        CheckpointError: a file is damaged.
    """
    config = tokenizer_config(folder)
    add_bos = config.get("add_bos_token")
    if tokenizer.kind == "sentencepiece" and add_bos is False:
        return ()
    bos = _token_in(config, "bos_token")
    if tokenizer.kind == "tokenizers" and not tokenizer.bos and add_bos is True and isinstance(bos, str):
        return (tokenizer.token(bos),)
    return tokenizer.bos
