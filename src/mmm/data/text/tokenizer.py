"""Text to tokens and back: characters, Hugging Face ``tokenizers`` files, SentencePiece models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.chat_format import chat_format_of
from mmm.data.text.formats import reading
from mmm.data.text.tokens import BYTES
from mmm.errors import ConfigError, DataError
from mmm.outside import parse_json, read_file

CODE_POINTS = 0x110000  # of Unicode
CUTS = ("truncation", "padding")  # fields of a tokenizer.json, for inputs of another program: a text is one input
DRAWS = ("dropout", "alpha", "nbest_size")  # of its model: a text would have other tokens each time


class CharTokenizer(Tokenizer):
    """A Unicode character is a token; the vocabulary is a list of characters, by code point."""

    kind = "chars"
    file = "tokenizer.json"
    splittable = True
    HEAD = b'{"kind": "chars"'  # how its file begins

    def __init__(self, chars: str) -> None:
        if not chars or len(set(chars)) < len(chars):
            raise DataError("a vocabulary of characters has none, or one twice")
        self.chars = chars
        self.vocab_size = len(chars)
        self.content = json.dumps({"kind": self.kind, "chars": chars}).encode()
        self._table = np.full(CODE_POINTS, -1, np.int32)  # code point -> token
        self._table[_codes(chars)] = np.arange(len(chars))

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> CharTokenizer:
        """All characters of these texts."""
        seen = np.zeros(CODE_POINTS, bool)  # by code point
        for text in texts:
            seen[_codes(_unicode(text))] = True
        return cls("".join(map(chr, np.flatnonzero(seen))))

    def encode(self, text: bytes) -> np.ndarray:
        codes = _codes(_unicode(text))
        tokens = self._table[codes]
        unknown = codes[tokens < 0]
        if len(unknown):
            raise DataError(f"character {chr(unknown[0])!r} is not among the {self.vocab_size} of the vocabulary")
        return tokens.astype(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``, without what draws or cuts in it."""

    kind = "tokenizers"
    file = "tokenizer.json"

    def __init__(self, content: bytes, name: object) -> None:
        package = _optional("tokenizers", name)
        self.content = content
        try:
            about = parse_json(content)
        except ValueError as error:
            raise DataError(f"--tokenizer {name}: {error}; a SentencePiece model is named .model") from None
        model = about.get("model")
        if not isinstance(model, dict):
            model = {}
        switched_off = []
        for part, fields in ((about, CUTS), (model, DRAWS)):
            switched_off += [field for field in fields if part.pop(field, None) is not None]
        if switched_off:
            content = json.dumps(about).encode()
            self.notes = (f"{name}: its {' and '.join(switched_off)} stays off: a text has the same tokens each time",)
        try:
            self._tokenizer = package.Tokenizer.from_buffer(content)
        except BaseException as error:  # the package raises nothing narrower, and panics by one that is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise DataError(f"--tokenizer {name} is no tokenizer of the package tokenizers: {error}") from None
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        if self.vocab_size > len(content):
            raise DataError(
                f"--tokenizer {name} is damaged: {len(content):,} bytes have a token {self.vocab_size - 1:,}"
            )
        # A BPE leaves out what it has no token for, unless it knows every byte or an unknown token.
        is_bpe = isinstance(self._tokenizer.model, package.models.BPE)
        has_bytes = vocabulary.keys() >= set(package.pre_tokenizers.ByteLevel.alphabet())
        self._may_lose = is_bpe and model.get("unk_token") is None and not has_bytes

    def encode(self, text: bytes) -> np.ndarray:
        characters = _unicode(text)
        try:
            encoding = self._tokenizer.encode(characters, add_special_tokens=False)
        except Exception as error:  # the package raises nothing narrower
            raise DataError(f"the tokenizer does not take the text: {error}") from None
        if self._may_lose:
            _check_all_covered(characters, encoding.offsets)
        return np.asarray(encoding.ids, self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def token(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        return super().token(name) if token is None else token


def _check_all_covered(text: str, offsets: Sequence[tuple[int, int]]) -> None:
    """Raises DataError where characters of a text, spaces aside, are in no token.

    Args:
        offsets: of each token, its first character and the one after its last.
    """
    lost = np.ones(len(text), bool)
    for begin, end in offsets:
        lost[begin:end] = False
    count = sum(not text[place].isspace() for place in np.flatnonzero(lost))
    if count:
        raise DataError(
            f"{count} of {len(text)} characters have no token, and would be left out: the tokenizer has neither an "
            "unknown token nor one for each byte"
        )


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    kind = "sentencepiece"
    file = "tokenizer.model"

    def __init__(self, content: bytes, name: object) -> None:
        package = _optional("sentencepiece", name)
        self.content = content
        self._processor = package.SentencePieceProcessor()
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
        token = self._processor.PieceToId(name)  # that of what is unknown, where it has none
        return token if self._processor.IdToPiece(token) == name else super().token(name)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """``bytes``, or a file: a SentencePiece ``.model``, or a JSON of ``tokenizers`` or of characters.

    Raises:
        DataError: the file cannot be read, is none of these, or needs a package that is not installed.
    """
    if str(name) == ByteTokenizer.kind:
        return ByteTokenizer()
    with reading(f"--tokenizer {name}, which is neither bytes nor chars"):
        content = read_file(name)
    tokenizer = tokenizer_of(Path(name), content)
    tokenizer.chat = chat_format_of(Path(name).parent)
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
    if content.startswith(CharTokenizer.HEAD):
        return _char_tokenizer(content, name)
    return HuggingFaceTokenizer(content, name)


def _char_tokenizer(content: bytes, name: Path) -> CharTokenizer:
    try:
        return CharTokenizer(parse_json(content)["chars"])
    except (AttributeError, KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"--tokenizer {name} is damaged: {error!r}") from None


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
        raise DataError(
            f"--tokenizer {name} needs the package {package}, which is not installed: pip install 'mmm[{package}]'"
        ) from None
