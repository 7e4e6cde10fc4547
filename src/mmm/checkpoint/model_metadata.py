"""What is known about a language model besides its sizes: its tokenizer, the tokens that begin and end a text, and what
the folder that it comes from says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmm.checkpoint.manifest import FileSum, file_sum
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file, read_json

# The names that a tokenizer's file may have, in any folder.
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
CONFIG = "config.json"
GENERATION = "generation_config.json"
# What a tokenizer's file lacks. The later one counts.
TOKENIZER_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
# The files in which a folder of `transformers` describes its model.
DESCRIPTIONS = (CONFIG, GENERATION, *TOKENIZER_CONFIGS)


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written as text.

    Attributes:
        template: chat template in Jinja, as `transformers` takes it; empty if the tokenizer has none.
        special_tokens: special tokens by the names that the template uses, such as ``eos_token``.
    """

    template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelMetadata:
    """What a checkpoint or a folder of weights says about its model besides the sizes.

    Attributes:
        block: number of tokens in the longest sequence that the model was trained on; None if unknown.
        eos: the tokens that end a text; any one of them does. Empty if unknown.
        tokenizer: name of the tokenizer's file (one of `TOKENIZERS`) and its content. Both are empty for a tokenizer
            of bytes, which has no file; None if there is no tokenizer.
        notes: remarks for people about what an import leaves out.
        bos: the tokens that begin a text; empty if unknown.
        chat: chat format of the tokenizer; None if unknown.
        base: the folder of `transformers` that the weights come from; of a model with LoRA, those next to its small
            matrices. None if others cannot read them.
        descriptions: content of the files of that folder that describe its model (`DESCRIPTIONS`), by name.
    """

    block: int | None = None
    eos: tuple[int, ...] = ()
    tokenizer: tuple[str, bytes] | None = None
    notes: tuple[str, ...] = ()
    bos: tuple[int, ...] = ()
    chat: ChatFormat | None = None
    base: str | None = None
    descriptions: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Describe the model for a checkpoint's `Manifest.about`; the tokenizer and the
        descriptions are files of their own."""
        about: dict[str, Any] = {"block": self.block, "bos": list(self.bos), "eos": list(self.eos), "base": self.base}
        about["tokenizer"] = None if self.tokenizer is None else self.tokenizer[0]
        about["chat"] = None if self.chat is None else asdict(self.chat)
        return about

    def write_files(self, folder: Path) -> dict[str, FileSum]:
        """Write the tokenizer's file and the descriptions into a folder. Returns their checksums by name."""
        contents = {name: json.dumps(content, indent=2).encode() for name, content in self.descriptions.items()}
        if self.tokenizer is not None:
            contents |= [self.tokenizer]
        # A tokenizer of bytes has no file, and no name.
        contents.pop("", None)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        return {name: file_sum(folder / name) for name in contents}


def read_descriptions(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the files of a folder that describe its model, by name. Raises CheckpointError: one is damaged."""
    paths = [folder / name for name in DESCRIPTIONS]
    return {path.name: read_json(path, CheckpointError) for path in paths if path.exists()}


def read_tokenizer(path: Path) -> bytes:
    """Read a tokenizer's file. Raises CheckpointError: it is not a regular file, or it is too large."""
    try:
        return read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
