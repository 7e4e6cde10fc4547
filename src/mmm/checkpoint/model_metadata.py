"""What is known of a language model besides its sizes: its tokenizer, the tokens that begin and end a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmm.checkpoint.manifest import FileSum, file_sum
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # names of their files, in whatever folder


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written as text.

    Attributes:
        template: in Jinja, as `transformers` takes it; empty where a tokenizer has none.
        special_tokens: by the names that the template calls them by, such as ``eos_token``.
    """

    template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelMetadata:
    """
    Attributes:
        block: tokens of the longest sequence that the model was trained for; None where nobody says.
        eos: the tokens of which one ends a text; empty where nobody says.
        tokenizer: name of the file, of `TOKENIZERS`, and its content; for bytes both are empty. None where there is
            none.
        notes: what is not taken along, for people.
        bos: the tokens that begin a text; empty where nobody says.
        chat: of the tokenizer; None where nobody says.
    """

    block: int | None = None
    eos: tuple[int, ...] = ()
    tokenizer: tuple[str, bytes] | None = None
    notes: tuple[str, ...] = ()
    bos: tuple[int, ...] = ()
    chat: ChatFormat | None = None

    def describe(self) -> dict[str, Any]:
        """What a checkpoint's `Manifest.about` says of the model, beside its file of the tokenizer."""
        tokenizer = None if self.tokenizer is None else self.tokenizer[0]
        about = {"block": self.block, "bos": list(self.bos), "eos": list(self.eos), "tokenizer": tokenizer}
        return about if self.chat is None else about | {"chat": asdict(self.chat)}

    def write_tokenizer(self, folder: Path) -> dict[str, FileSum]:
        """Write the tokenizer's file into a folder; its sum, by name. Empty where there is no file."""
        if self.tokenizer is None or not self.tokenizer[0]:
            return {}
        name, content = self.tokenizer
        (folder / name).write_bytes(content)
        return {name: file_sum(folder / name)}


def read_tokenizer(path: Path) -> bytes:
    """A tokenizer's file. Raises CheckpointError: it is no file, or too large."""
    try:
        return read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
