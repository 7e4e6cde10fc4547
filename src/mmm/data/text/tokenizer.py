"""Text to tokens and back: characters, Hugging Face ``tokenizers`` files, SentencePiece models."""

from __future__ import annotations

import contextlib
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

# Number of code points of Unicode.
CODE_POINTS = 0x110000
# Fields of a tokenizer.json's model that make it random: a text would have other tokens each time.
DRAWS = ("dropout", "alpha", "nbest_size")


class CharTokenizer(Tokenizer):
    """A Unicode character is a token; the vocabulary is a list of characters, ordered by code point."""

    kind = "chars"
    file = "tokenizer.json"
    splittable = True
    # How its file begins.
    HEAD = b'{"kind": "chars"'

    def __init__(self, chars: str) -> None:
        if not chars or len(set(chars)) < len(chars):
            raise DataError("a vocabulary of characters is empty, or has one twice")
        self.chars = chars
        self.vocab_size = len(chars)
        self.content = json.dumps({"kind": self.kind, "chars": chars}).encode()
        # Code point → token; -1 for characters that are not in the vocabulary.
        self._table = np.full(CODE_POINTS, -1, np.int32)
        self._table[_codes(chars)] = np.arange(len(chars))

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> CharTokenizer:
        """Make the tokenizer of all characters of these texts."""
        seen = np.zeros(CODE_POINTS, bool)
        for text in texts:
            seen[_codes(_unicode(text))] = True
        codes = np.flatnonzero(seen)
        return cls("".join(map(chr, codes)))

    def encode(self, text: bytes) -> np.ndarray:
        codes = _codes(_unicode(text))
        tokens = self._table[codes]
        unknown = codes[tokens < 0]
        if len(unknown):
            character = chr(unknown[0])
            raise DataError(f"character {character!r} is not among the {self.vocab_size} of the vocabulary")
        return tokens.astype(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``, with truncation and padding off: a text is one input.

    Args:
        content: the file.
        name: what messages call it.

    Raises:
        DataError: it is not such a file, it is random, or the package is not installed.
    """

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
        for field in DRAWS:
            if model.get(field) is not None:
                raise DataError(
                    f"--tokenizer {name}: its model has {field} {model[field]}, so a text has other tokens each time: "
                    f"set it to null"
                )
        with _refusing(f"--tokenizer {name} is not a tokenizer of the package tokenizers"):
            self._tokenizer = package.Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # The package raises nothing narrower where the vocabulary has no letter a.
            with contextlib.suppress(Exception):
                encoded = self._tokenizer.encode("a")
                # 1 for each special token, 0 for those of the text.
                mask = encoded.special_tokens_mask
                if 0 in mask:
                    self.bos = tuple(encoded.ids[: mask.index(0)])
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        vocabulary = self._tokenizer.get_vocab()
        largest = max(vocabulary.values(), default=0)
        self.vocab_size = largest + 1
        # One wrong number in a file would otherwise ask for an embedding with as many rows.
        if self.vocab_size > len(content):
            size = len(content)
            raise DataError(f"--tokenizer {name} is damaged: {size:,} bytes have a token {largest:,}")
        # A BPE leaves out what it has no token for, unless it knows every byte or an unknown token.
        is_bpe = isinstance(self._tokenizer.model, package.models.BPE)
        alphabet = package.pre_tokenizers.ByteLevel.alphabet()
        has_bytes = vocabulary.keys() >= set(alphabet)
        has_unknown = model.get("unk_token") is not None
        self._may_lose = is_bpe and not has_unknown and not has_bytes

    def encode(self, text: bytes) -> np.ndarray:
        characters = _unicode(text)
        with _refusing("the tokenizer does not take the text"):
            encoding = self._tokenizer.encode(characters, add_special_tokens=False)
        if self._may_lose:
            _check_all_covered(characters, encoding.offsets)
        return np.asarray(encoding.ids, self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        ids = [int(token) for token in tokens]
        with _refusing("the tokenizer has no text for its tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            return super().token(name)
        return token


@contextlib.contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Make a DataError of what the package tokenizers raises.

    It raises nothing narrower than an Exception, and when it panics, something that is not one.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise DataError(f"{problem}: {error}") from None


def _check_all_covered(text: str, offsets: Sequence[tuple[int, int]]) -> None:
    """Raise DataError if characters of a text, other than spaces, are in no token.

    Args:
        offsets: first character of each token, and the one after its last.
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
    """A SentencePiece model.

    Args:
        content: the model's file.
        name: what messages call it.

    Raises:
        DataError: it is not such a model, or the package is not installed.
    """

    kind = "sentencepiece"
    file = "tokenizer.model"

    def __init__(self, content: bytes, name: object) -> None:
        package = _optional("sentencepiece", name)
        self.content = content
        self._processor = package.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError:
            raise DataError(f"--tokenizer {name} ({len(content)} bytes) is not a SentencePiece model") from None
        self.vocab_size = self._processor.GetPieceSize()
        # -1: the model has no such token.
        if self._processor.bos_id() >= 0:
            self.bos = (self._processor.bos_id(),)

    def encode(self, text: bytes) -> np.ndarray:
        ids = self._processor.EncodeAsIds(_unicode(text))
        return np.asarray(ids, self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        ids = [int(token) for token in tokens]
        return self._processor.DecodeIds(ids)

    def token(self, name: str) -> int:
        # For a name that it does not have, this is the id of the unknown token.
        token = self._processor.PieceToId(name)
        if self._processor.IdToPiece(token) != name:
            return super().token(name)
        return token


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load the tokenizer of bytes or one from a file.

    Args:
        name: ``bytes``, or a path: a SentencePiece ``.model``, or a JSON of ``tokenizers`` or of characters.

    Raises:
        DataError: the file cannot be read, is none of these, or needs a package that is not installed.
    """
    if str(name) == ByteTokenizer.kind:
        return ByteTokenizer()
    with reading(f"--tokenizer {name}, which is neither bytes nor chars"):
        content = read_file(name)
    path = Path(name)
    tokenizer = tokenizer_of(path, content)
    tokenizer.chat = chat_format_of(path.parent)
    return tokenizer


def tokenizer_of(name: Path, content: bytes) -> Tokenizer:
    """Make the tokenizer of a file that has been read. An empty name means the tokenizer of bytes, which has no file.

    Raises:
        DataError: the content is not a tokenizer, or needs a package that is not installed.
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
    """Train a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019). Returns its ``tokenizer.json``.

    Args:
        texts: texts to train on, such as lines.
        vocab_size: number of tokens, including the 256 bytes and `eos`.
        eos: the special token that ends a text.

    Raises:
        ConfigError: the vocabulary is too small for the bytes and `eos`.
        DataError: the package is not installed.
    """
    if vocab_size <= BYTES:
        raise ConfigError(f"--train-bpe {vocab_size}: it must be more than {BYTES}, for every byte and {eos}")
    package = _optional("tokenizers", f"by --train-bpe {vocab_size}")
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        # Every byte is a token, so that every text can be encoded.
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def _codes(text: str) -> np.ndarray:
    """The code points of a text, (characters,) uint32."""
    # UTF-32 has 4 bytes per character: its code point.
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
