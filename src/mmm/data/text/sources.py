"""What ``--text`` and ``--tokenizer`` name: texts, files of tokens, and mixtures of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmm.data.order import stream
from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.chat_tokens import Chats, FilledUp, chat_samples, encode_chats, notes_of, read_chat_files
from mmm.data.text.chats import is_chat_file
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.documents import DocumentTokens, FileTokens, PackedTokens
from mmm.data.text.formats import refuse_other_formats
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer
from mmm.data.text.tokens import TextTokens, TokenArray, Tokens
from mmm.errors import ConfigError, DataError


class Mixture(Tokens):
    """Samples of several sources, in a fixed proportion.

    Every `BLOCK` samples have the same number of each source, in an order that depends on (seed, block): which source
    a sample has, and how many that had before, follow from its number. A source that ends begins its next epoch.

    Args:
        sources: of one sequence length. weights: of each source; their sum does not matter.

    Attributes:
        samples: of all sources together: what counts as an epoch.

    Raises:
        ConfigError: a weight is so small that its source would have no sample.
    """

    BLOCK = 1 << 16

    def __init__(self, sources: Sequence[Tokens], weights: Sequence[float], seed: int) -> None:
        super().__init__(sources[0].seq_length, seed)
        self.sources, self.has_padding = tuple(sources), any(source.has_padding for source in sources)
        self.samples = sum(source.samples for source in sources)
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * self.BLOCK).astype(np.int64)
        self.quota = np.diff(ends, prepend=0)  # samples of each source in a block
        if self.quota.min() < 1:
            raise ConfigError(
                f"--text: a weight of {min(weights)} in {sum(weights)} is less than one sample in {self.BLOCK}"
            )

    def begin(self, step: int, global_batch: int) -> tuple[int, int]:
        return 0, step * global_batch  # each source has epochs of its own

    def source_of(self, number: int) -> tuple[int, int]:
        """The source of a sample, and how many samples that source has had before it."""
        block, place = divmod(number, self.BLOCK)
        sources, before = _block(self.seed, block, tuple(self.quota))
        source = int(sources[place])
        return source, block * int(self.quota[source]) + int(before[place])

    def sample(self, epoch: int, place: int) -> np.ndarray:
        source, count = self.source_of(epoch * self.samples + place)
        row = self.sources[source].sample(*divmod(count, self.sources[source].samples))
        return np.stack((row[:-1], row[1:])) if self.has_padding and row.ndim == 1 else row


@lru_cache(maxsize=4)
def _block(seed: int, block: int, quota: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample of a block its source, and how many of that source come before it in the block."""
    state = np.random.RandomState(stream(seed, block & 0xFFFFFFFF, block >> 32, 1))
    sources = state.permutation(np.repeat(np.arange(len(quota)), quota))
    before = np.empty_like(sources)
    for source, count in enumerate(quota):
        before[sources == source] = np.arange(count)
    return sources, before


@dataclass(frozen=True)
class Sources:
    """One corpus, or several with a weight each.

    Attributes:
        tokenizer: of them all; None where no file says.
    """

    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...]
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.kind == ByteTokenizer.kind

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text to validate on, a token; None where a corpus does not say."""
        each = [corpus.bytes_per_token or math.nan for corpus in self.corpora]
        mean = math.fsum(weight * of_one for weight, of_one in zip(self.weights, each, strict=True))
        return None if math.isnan(mean) else mean

    def tokens(
        self, seq_length: int, seed: int, vocab_size: int, pack: bool = False, document_mask: bool = False
    ) -> tuple[Tokens, Tokens]:
        """To train on, in an order that depends on the seed, and to validate on, in order.

        Args:
            pack: whole documents (`PackedTokens`). document_mask: with where they begin.

        Raises:
            ConfigError: a text does not say where documents end, and one of the two is asked for.
            DataError: a text is shorter than a sequence, or has tokens that the vocabulary lacks.
        """
        flag = "--pack" if pack else "--document_mask"
        for corpus in self.corpora:
            if (pack or document_mask) and corpus.documents is None and not corpus.is_chats:
                raise ConfigError(
                    f"{flag}: {corpus.source} does not say where documents end: prepare its texts by mmm tokens"
                )

        def samples(part: Callable[[Corpus], TokenArray], shuffle: bool) -> Tokens:
            found: list[Tokens] = []
            for corpus in self.corpora:
                text, documents = part(corpus), corpus.documents
                if corpus.is_chats:
                    found.append(chat_samples(text, seq_length, seed, shuffle, vocab_size, pack, document_mask))
                elif isinstance(text, TokenFile) and documents is not None and (pack or document_mask):
                    given = (text, documents(), seq_length, seed, shuffle)
                    if pack:
                        found.append(PackedTokens(*given, vocab_size=vocab_size, document_starts=document_mask))
                    else:
                        found.append(DocumentTokens(*given, vocab_size=vocab_size))
                elif isinstance(text, TokenFile):
                    found.append(FileTokens(text, seq_length, seed, shuffle, vocab_size=vocab_size))
                else:
                    found.append(TextTokens(text, seq_length, seed, shuffle, unit=corpus.unit))
            return found[0] if len(found) == 1 else Mixture(found, self.weights, seed)

        train, validation = (
            samples(lambda corpus: corpus.train, True),
            samples(lambda corpus: corpus.validation, False),
        )
        return train, FilledUp(validation) if any(corpus.is_chats for corpus in self.corpora) else validation

    def notes(self, seq_length: int) -> list[str]:
        """What is to be said of the data at the start of a run."""
        return [note for corpus in self.corpora if corpus.is_chats for note in notes_of(corpus, seq_length)]

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        if len(self.corpora) == 1:
            return self.corpora[0].describe()
        pairs = list(zip(self.corpora, self.weights, strict=True))
        mixture = [corpus.describe() | {"weight": weight} for corpus, weight in pairs]
        names = ", ".join(f"{corpus.source}:{weight:g}" for corpus, weight in pairs)
        parts = "\n".join(f"{corpus.sha256} {weight:.9g}" for corpus, weight in pairs)
        return {"source": names, "sha256": hashlib.sha256(parts.encode()).hexdigest(), "mixture": mixture}


def open_sources(
    text: Sequence[Path] = (),
    tokenizer: str | None = None,
    default: Callable[[], Tokenizer | None] = lambda: None,
    token_dtype: str | None = None,
) -> Sources:
    """The data that the flags name.

    Args:
        text: files, or each with a weight, as ``PATH:0.7``; none for the standard library. Several files of text
            without weights are one text.
        tokenizer: bytes, chars (the characters of the texts) or a tokenizer's file. None: that of the token files, else
            `default`, else bytes.
        token_dtype: of files of tokens that do not say it, such as ``uint16``.

    Raises:
        ConfigError, DataError: what does not fit together, or cannot be read.
    """
    given = [_weight(path) for path in text]
    weights = [1.0 if weight is None else weight for _, weight in given]
    weighted = [path for path, weight in given if weight is not None]
    if weighted and len(weighted) < len(given):
        without = next(path for path, weight in given if weight is None)
        raise ConfigError(f"--text {without} has no weight, and {weighted[0]} has one: give each one, or none")
    files = [open_tokens(path, token_dtype) for path, _ in given]
    chats = [found is None and is_chat_file(path) for found, (path, _) in zip(files, given, strict=True)]
    if (any(files) or (any(chats) and not all(chats))) and len(files) > 1 and not weighted:
        example = " ".join(f"{path}:{1 / len(given):.2g}" for path in text)
        kind = "token files" if any(files) else "files, of texts and of conversations,"
        raise ConfigError(f"--text: give each of several {kind} a weight, such as {example}")
    chosen, of_text = _tokenizer(files, tokenizer), tokenizer == CharTokenizer.kind
    if chosen is None and not of_text and not (files and all(files)):
        chosen = default() or ByteTokenizer()
    between_characters = chosen is None or chosen.kind != ByteTokenizer.kind
    texts: list[Corpus | Chats]
    if any(files) or weighted:
        texts = [
            found or (read_chat_files([path]) if is_chat else _read([path], between_characters))
            for found, is_chat, (path, _) in zip(files, chats, given, strict=True)
        ]
    else:
        texts = [
            read_chat_files(text) if any(chats) else _read(text, between_characters) if text else standard_library()
        ]
        weights = [1.0]
    if chosen is None and of_text:
        chosen = CharTokenizer.of(part for each in texts for part in _parts(each))
    corpora = tuple(_encoded(each, chosen) for each in texts)  # type: ignore[arg-type]
    return Sources(corpora, tuple(weight / math.fsum(weights) for weight in weights), chosen)


def _read(paths: Sequence[Path], between_characters: bool) -> Corpus:
    return read_text_files(paths, between_characters, refuse_other_formats)


def _parts(text: Corpus | Chats) -> Iterable[bytes]:
    """The text of what is not in tokens yet."""
    if isinstance(text, Chats):
        return text.plain_texts()
    return (part[:].tobytes() for part in (text.train, text.validation) if text.unit == "bytes")


def _encoded(corpus: Corpus | Chats, tokenizer: Tokenizer) -> Corpus:
    """A text of bytes as the tokens of another tokenizer, in memory; what is in tokens as it is.

    Raises:
        DataError: the text is no UTF-8, or has a character that the vocabulary lacks; a conversation that the chat
            template does not take.
    """
    if isinstance(corpus, Chats):
        return encode_chats(corpus, tokenizer)
    if corpus.unit == "tokens":
        return corpus
    if tokenizer.kind == ByteTokenizer.kind:
        return corpus
    try:
        train, validation = (tokenizer.encode(part[:].tobytes()) for part in (corpus.train, corpus.validation))
    except DataError as error:
        raise DataError(f"{corpus.source}: {error}") from None
    digest = hashlib.sha256(f"{corpus.sha256} {tokenizer.sha256}".encode()).hexdigest()
    each = len(corpus.validation) / max(len(validation), 1)
    return Corpus(train, validation, corpus.source, corpus.files, digest, "tokens", tokenizer, bytes_per_token=each)


def _weight(path: Path) -> tuple[Path, float | None]:
    """``PATH:0.7`` as path and weight. A path that is there has no weight, whatever its name."""
    name, colon, number = str(path).rpartition(":")
    if not colon or not name or path.exists():
        return path, None
    try:
        weight = float(number)
    except ValueError:
        return path, None
    if not 0 < weight < math.inf:
        raise ConfigError(f"--text {path}: a weight must be greater than 0, and finite")
    return Path(name), weight


def _tokenizer(files: Sequence[Corpus | None], name: str | None) -> Tokenizer | None:
    """The one that is asked for or that the token files have; None where there is neither, or for chars of a text.

    Raises:
        DataError: they differ.
    """
    chosen = None if name is None or name == CharTokenizer.kind else load_tokenizer(name)
    chosen_by = f"--tokenizer {name}"
    for corpus in files:
        if corpus is None or corpus.tokenizer is None:
            continue
        kind = corpus.tokenizer.kind
        if chosen is None and name in (None, kind):  # chars: the characters of the file
            chosen, chosen_by = corpus.tokenizer, corpus.source
        if chosen is None or chosen.sha256 != corpus.tokenizer.sha256:
            other = chosen or name
            raise DataError(
                f"--text {corpus.source} was made by another tokenizer ({corpus.tokenizer}) than {chosen_by} ({other}):"
                f" prepare it again with mmm tokens --tokenizer, or leave --tokenizer out"
            )
    return chosen
