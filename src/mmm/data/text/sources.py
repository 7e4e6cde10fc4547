"""What ``--text`` and ``--tokenizer`` name: texts, files of tokens, and mixtures of them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.order import stream
from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.chat_tokens import ChatText, ChatTokens, encode_chats, plain_texts, read_chat_files
from mmm.data.text.chats import Conversation
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.documents import FileTokens, PackedTokens
from mmm.data.text.formats import is_chats
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer
from mmm.data.text.tokens import TextTokens, Tokens
from mmm.errors import ConfigError, DataError

WEIGHTED = re.compile(r"(.+):([0-9]*\.?[0-9]+)")  # PATH:0.7


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
        sources = _block(self.seed, block, tuple(self.quota))
        source = int(sources[place])
        before = int(np.count_nonzero(sources[:place] == source))
        return source, block * int(self.quota[source]) + before

    def sample(self, epoch: int, place: int) -> np.ndarray:
        source, count = self.source_of(epoch * self.samples + place)
        row = self.sources[source].sample(*divmod(count, self.sources[source].samples))
        return np.stack((row[:-1], row[1:])) if self.has_padding and row.ndim == 1 else row


@lru_cache(maxsize=4)
def _block(seed: int, block: int, quota: tuple[int, ...]) -> np.ndarray:
    """Of each sample of a block its source."""
    state = np.random.RandomState(stream(seed, block & 0xFFFFFFFF, block >> 32, 1))
    return state.permutation(np.repeat(np.arange(len(quota)), quota))


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
        mean = 0.0
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            if corpus.bytes_per_token is None:
                return None
            mean += weight * corpus.bytes_per_token
        return mean

    def tokens(
        self, seq_length: int, seed: int, vocab_size: int, pack: bool = False, document_mask: bool = False
    ) -> tuple[Tokens, Tokens]:
        """To train on, in an order that depends on the seed, and to validate on, in order.

        Args:
            pack: whole documents (`PackedTokens`). document_mask: with where they begin.

        Raises:
            ConfigError: a text does not say where documents end, and is to be packed; a mask of what is not packed.
            DataError: a text is shorter than a sequence, or has tokens that the vocabulary lacks.
        """

        def samples(corpus: Corpus, text: Any, shuffle: bool) -> Tokens:
            order = (seq_length, seed, shuffle)
            if isinstance(text, ChatText):
                chats = text.cut(seq_length)
                return ChatTokens(chats, *order, vocab_size=vocab_size, pack=pack, document_starts=document_mask)
            if pack:
                if corpus.documents is None:
                    raise ConfigError(
                        f"--pack: {corpus.source} does not say where documents end: prepare its texts by mmm tokens"
                    )
                ends = corpus.documents()
                return PackedTokens(text, ends, *order, vocab_size=vocab_size, document_starts=document_mask)
            if isinstance(text, TokenFile):
                return FileTokens(text, *order, vocab_size=vocab_size)
            return TextTokens(text, *order, unit=corpus.unit)

        if document_mask and not pack:
            raise ConfigError("--document_mask is of documents that --pack puts into a sequence: give --pack as well")
        train = [samples(corpus, corpus.train, True) for corpus in self.corpora]
        validation = [samples(corpus, corpus.validation, False) for corpus in self.corpora]
        if len(train) == 1:
            return train[0], validation[0]
        return Mixture(train, self.weights, seed), Mixture(validation, self.weights, seed)

    def notes(self, seq_length: int) -> list[str]:
        """What is to be said of the data at the start of a run."""
        notes = list(self.tokenizer.notes) if self.tokenizer else []
        for corpus in self.corpora:
            if isinstance(corpus.train, ChatText):
                notes.append(f"{corpus.source}, to train on: {corpus.train.note(seq_length)}")
                notes.append(f"{corpus.source}, to validate on: {corpus.validation.note(seq_length)}")
            notes += corpus.notes
        return notes

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        if len(self.corpora) == 1:
            return self.corpora[0].describe()
        pairs = list(zip(self.corpora, self.weights, strict=True))
        parts = "\n".join(f"{corpus.sha256} {weight:.9g}" for corpus, weight in pairs)
        return {
            "source": ", ".join(f"{corpus.source}:{weight:g}" for corpus, weight in pairs),
            "sha256": hashlib.sha256(parts.encode()).hexdigest(),
            "mixture": [corpus.describe() | {"weight": weight} for corpus, weight in pairs],
        }


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
    paths, weights = _weighted(text)
    files = [open_tokens(path, token_dtype) for path in paths]
    kinds = [_kind(path, file) for path, file in zip(paths, files, strict=True)]
    if not weights and len(paths) > 1 and ("tokens" in kinds or len(set(kinds)) > 1):
        example = " ".join(f"{path}:{1 / len(paths):.2g}" for path in paths)
        raise ConfigError(f"--text: files of {', '.join(sorted(set(kinds)))} need a weight each, such as {example}")
    chosen = _tokenizer(files, tokenizer)
    from_texts = tokenizer == CharTokenizer.kind
    if chosen is None and not from_texts and not (files and all(files)):
        chosen = default() or ByteTokenizer()
    utf8 = chosen is None or chosen.kind != ByteTokenizer.kind
    groups = [[path] for path in paths] if weights else [paths]  # without weights, several files are one
    texts: list[Corpus | list[Conversation]] = []
    for group, file, kind in zip(groups, files or [None], kinds or ["text"], strict=False):
        if file is not None:
            texts.append(file)
        elif kind == "conversations":
            texts.append(read_chat_files(group))
        else:
            texts.append(read_text_files(group, utf8) if group else standard_library())
    if chosen is None and from_texts:
        chosen = CharTokenizer.of(part for each in texts for part in _parts(each))
    corpora = tuple(_encoded(each, group, chosen) for each, group in zip(texts, groups, strict=True))
    weights = weights or [1.0]
    return Sources(corpora, tuple(weight / math.fsum(weights) for weight in weights), chosen)


def _kind(path: Path, file: Corpus | None) -> str:
    if file is not None:
        return "tokens"
    return "conversations" if is_chats(path) else "text"


def _parts(text: Corpus | list[Conversation]) -> Iterable[bytes]:
    """The text of what is not in tokens yet."""
    if isinstance(text, list):
        return plain_texts(text)
    return [part.tobytes() for part in (text.train, text.validation) if text.unit == "bytes"]


def _encoded(text: Corpus | list[Conversation], paths: Sequence[Path], tokenizer: Tokenizer | None) -> Corpus:
    """A text of bytes as the tokens of another tokenizer, in memory; what is in tokens as it is.

    Raises:
        DataError: the text has a character that the vocabulary lacks; a conversation that the chat template does not
            take.
    """
    if isinstance(text, list):
        assert tokenizer is not None
        return encode_chats(paths, text, tokenizer)
    if text.unit == "tokens" or tokenizer is None or tokenizer.kind == ByteTokenizer.kind:
        return text
    try:
        train, validation = (tokenizer.encode(part.tobytes()) for part in (text.train, text.validation))
    except DataError as error:
        raise DataError(f"{text.source}: {error}") from None
    return replace(
        text,
        train=train,
        validation=validation,
        sha256=hashlib.sha256(f"{text.sha256} {tokenizer.sha256}".encode()).hexdigest(),
        unit="tokens",
        tokenizer=tokenizer,
        bytes_per_token=len(text.validation) / max(len(validation), 1),
    )


def _weighted(text: Sequence[Path]) -> tuple[list[Path], list[float]]:
    """Of ``PATH:0.7 …`` the paths and the weights, of which there may be none. A path that is there has no weight,
    whatever its name.

    Raises:
        ConfigError: a weight is 0, or some have one and others have not.
    """
    paths, weights = [], []
    for path in text:
        weighted = None if path.exists() else WEIGHTED.fullmatch(str(path))
        if weighted is not None:
            path = Path(weighted[1])
            weights.append(float(weighted[2]))
        paths.append(path)
    if weights and (len(weights) < len(paths) or min(weights) <= 0):
        names = " ".join(map(str, text))
        raise ConfigError(f"--text {names}: give each one a weight greater than 0, or none")
    return paths, weights


def _tokenizer(files: Sequence[Corpus | None], name: str | None) -> Tokenizer | None:
    """The one that is asked for or that the token files have; None where there is neither, or for chars of a text.

    Raises:
        DataError: they differ.
    """
    made = [corpus for corpus in files if corpus is not None and corpus.tokenizer is not None]
    of_text = name == CharTokenizer.kind
    chosen = made[0].tokenizer if made else None
    if name is not None and not of_text:
        chosen = load_tokenizer(name)
    for corpus in made:
        assert corpus.tokenizer is not None
        assert chosen is not None
        if corpus.tokenizer.sha256 != chosen.sha256 or (of_text and chosen.kind != name):
            raise DataError(
                f"--text {corpus.source} was made by another tokenizer ({corpus.tokenizer}) than --tokenizer "
                f"{name or made[0].source} has: prepare it again with mmm tokens --tokenizer, or leave --tokenizer out"
            )
    return chosen
