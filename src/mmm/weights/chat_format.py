"""The chat template of a tokenizer, and the names of its special tokens, as others keep them beside weights.

Hugging Face: ``chat_template.jinja``; without it ``chat_template`` of tokenizer_config.json, a text or a list of named
ones, of which "default" counts. GGUF: ``tokenizer.chat_template``, and special tokens by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file, read_json, short
from mmm.weights.first_tokens import CONFIGS

TEMPLATE = "chat_template.jinja"
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GGUF_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def chat_format_of_folder(folder: Path) -> ChatFormat | None:
    """Of a folder as `transformers` writes it; None where no file says anything. Raises CheckpointError: one is
    damaged."""
    files = [folder / name for name in CONFIGS if (folder / name).exists()]
    about = {key: value for path in files for key, value in read_json(path, CheckpointError).items()}
    return chat_format_of(about, folder)


def chat_format_of(about: Mapping[str, Any], folder: Path) -> ChatFormat | None:
    """As `chat_format_of_folder`.

    Args:
        about: what the files of `CONFIGS` say.
    """
    template = about.get("chat_template") or ""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default", "")
    if (path := folder / TEMPLATE).exists():
        try:
            template = read_file(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not UTF-8"
            raise CheckpointError(f"{path} cannot be read: {why}") from None
    if not isinstance(template, str):
        raise CheckpointError(f"{folder / CONFIGS[1]}: chat_template is {short(template)}, which is no text")
    given = {name: value.get("content") if isinstance(value := about.get(name), dict) else value for name in NAMES}
    tokens = {name: token for name, token in given.items() if isinstance(token, str)}
    return ChatFormat(template, tokens) if template or tokens else None


def chat_format_of_gguf(keys: Mapping[str, Any], where: object) -> ChatFormat | None:
    """Of a file's keys. Raises CheckpointError: the template is no text."""
    template, tokens = keys.get("tokenizer.chat_template", ""), keys.get("tokenizer.ggml.tokens", [])
    if not isinstance(template, str):
        raise CheckpointError(f"{where}: tokenizer.chat_template is {short(template)}, which is no text")
    ids = {name: keys.get(f"tokenizer.ggml.{key}_token_id") for key, name in GGUF_NAMES.items()}
    named = {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    return ChatFormat(template, named) if template or named else None
