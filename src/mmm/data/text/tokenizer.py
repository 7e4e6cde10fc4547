"""Text to tokens and back: characters, Hugging Face ``tokenizers`` files, SentencePiece models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.tokens import BYTES
from mmm.errors import ConfigError, DataError
from mmm.outside import parse_json, read_file
from mmm.weights.chat_format import chat_format_of_folder


class CharTokenizer(Tokenizer):
    """A Unicode character is a token; the vocabulary is a list of characters, by code point."""

    kind, file, splittable = "chars", "tokenizer.json", True

    def __init__(self, chars: str) -> None:
        if not chars:
            raise DataError("a vocabulary of characters is empty: the text has none")
        self.chars, self.vocab_size = chars, len(chars)
        self.content = json.dumps({"kind": self.kind, "chars": chars}).encode()
        try:
            codes = _codes(chars)
        except UnicodeEncodeError as error:
            raise DataError(f"a vocabulary of characters has {error.object[error.start]!r}, half of one") from None
        self._table = np.full(int(codes.max()) + 1, -1, np.int32)  # code point -> token
        self._table[codes] = np.arange(len(chars))

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> CharTokenizer:
        """All characters of these texts."""
        seen: set[int] = set()
        for text in texts:
            seen |= characters(text)
        return cls("".join(map(chr, sorted(seen))))

    def encode(self, text: bytes) -> np.ndarray:
        codes = _codes(_unicode(text))
        tokens = self._table[np.minimum(codes, len(self._table) - 1)]
        unknown = (tokens < 0) | (codes >= len(self._table))
        if unknown.any():
            place = int(unknown.argmax())
            raise DataError(f"character {chr(codes[place])!r} is not among the {self.vocab_size} of the vocabulary")
        return tokens.astype(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``."""

    kind, file = "tokenizers", "tokenizer.json"

    def __init__(self, content: bytes, name: object) -> None:
        package = _optional("tokenizers", name)
        self.content = content
        try:
            self._tokenizer = package.Tokenizer.from_buffer(content)
        except BaseException as error:  # the package raises nothing narrower, and panics by one that is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise DataError(f"--tokenizer {name} is no tokenizer of the package tokenizers: {error}") from None
        self._tokenizer.no_truncation()  # a file may ask for either, for inputs of another program: a text is one input
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        if self.vocab_size > len(content):
            raise DataError(
                f"--tokenizer {name} is damaged: {len(content):,} bytes have a token {self.vocab_size - 1:,}"
            )

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(_unicode(text), add_special_tokens=False).ids, self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def token(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        return super().token(name) if found is None else found


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, content: bytes, name: object) -> None:
        package = _optional("sentencepiece", name)
        self.content, self._processor = content, package.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError:
            raise DataError(f"--tokenizer {name} ({len(content)} bytes) is no SentencePiece model") from None
        self.vocab_size = self._processor.GetPieceSize()

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._processor.EncodeAsIds(_unicode(text)), self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.DecodeIds([int(token) for token in tokens])

    def token(self, name: str) -> int:
        found = self._processor.PieceToId(name)
        return found if self._processor.IdToPiece(found) == name else super().token(name)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """``bytes``, or a file: a SentencePiece ``.model``, or a JSON of ``tokenizers`` or of characters.

    Raises:
        DataError: the file cannot be read, is none of these, or needs a package that is not installed.
    """
    if str(name) == ByteTokenizer.kind:
        return ByteTokenizer()
    try:
        content = read_file(name)
    except OSError as error:
        raise DataError(f"--tokenizer {name}: {error.strerror or error}; give bytes, chars or a file") from None
    tokenizer = tokenizer_of(Path(name), content)
    tokenizer.chat = chat_format_of_folder(Path(name).parent)
    return tokenizer


def tokenizer_of(name: Path, content: bytes) -> Tokenizer:
    """The tokenizer of a file that has been read; without a name that of bytes, which has none.

    Raises:
        DataError: as `load_tokenizer`.
    """
    if not name.name:
        return ByteTokenizer()
    if name.suffix == ".model":
        return SentencePieceTokenizer(content, name)
    try:
        about = parse_json(content)
    except ValueError as error:
        raise DataError(f"--tokenizer {name}: {error}; a SentencePiece model is named .model") from None
    if about.get("kind") == CharTokenizer.kind:
        if not isinstance(chars := about.get("chars"), str) or len(set(chars)) < len(chars):
            raise DataError(f"--tokenizer {name} is damaged: it has no chars, a text of different characters")
        return CharTokenizer(chars)
    return HuggingFaceTokenizer(content, name)


def train_bpe(texts: Iterator[str], vocab_size: int, eos: str) -> bytes:
    """The ``tokenizer.json`` of a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), for every text.

    Args:
        texts: such as lines. vocab_size: tokens, the 256 bytes and `eos` among them.

    Raises:
        ConfigError: a vocabulary too small for these. DataError: the package is not installed.
    """
    if vocab_size <= BYTES:
        raise ConfigError(f"--train-bpe {vocab_size}: it must be more than {BYTES}, for every byte and {eos}")
    package = _optional("tokenizers", f"by --train-bpe {vocab_size}")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def characters(text: bytes) -> set[int]:
    """The code points that a UTF-8 text has."""
    seen = np.zeros(0x110000, bool)
    seen[_codes(_unicode(text))] = True
    return set(seen.nonzero()[0].tolist())


def _codes(text: str) -> np.ndarray:
    """Code points, (characters,) uint32."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _unicode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8: {error.reason} at byte {error.start}; use --tokenizer bytes") from None


def _optional(package: str, name: object) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        wanted = f"--tokenizer {name} needs the package {package}"
        raise DataError(f"{wanted}, which is not installed: pip install 'mmm[{package}]'") from None
