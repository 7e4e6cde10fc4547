"""Several corpora as one, of which each has its share of the sequences.

An epoch has as many sequences as all corpora together. Each corpus has its share of them, in an order of its own: none
of its sequences comes again before all others of it have come, also over the end of an epoch. Which corpus stands at
which place is a function of seed and epoch. So each rank finds each sequence by itself, and a run that is resumed goes
on with the next one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mmm.data.order import permuted
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_tokens import ChatText
from mmm.data.text.sources import Sources
from mmm.data.text.tokens import Tokens
from mmm.errors import ConfigError, DataError


class BlendedTokens(Tokens):
    """The sequences of several corpora.

    Args:
        parts: the sequences of each corpus, of one length and all with documents or none.
        weights: a number above 0 for each: its share is in proportion.

    Attributes:
        ends: where the share of each corpus ends, in sequences of an epoch.
        shares: the number of sequences that each corpus has in an epoch.
    """

    def __init__(self, parts: Sequence[Tokens], weights: Sequence[float]) -> None:
        first = parts[0]
        # Sequences to validate on are the same for every seed.
        seed = first.seed if first.shuffle else 0
        super().__init__(first.seq_length, seed, first.shuffle)
        self.parts = parts
        self.samples = sum(tokens.samples for tokens in parts)
        # The last sequence of a text that keeps its order may be filled up.
        self.has_padding = not first.shuffle or any(tokens.has_padding for tokens in parts)
        sums = list(accumulate(weights))
        self.ends = [round(self.samples * weight / sums[-1]) for weight in sums]
        begins = [0, *self.ends[:-1]]
        self.shares = [end - begin for begin, end in zip(begins, self.ends, strict=True)]

    def sample(self, epoch: int, place: int) -> np.ndarray:
        if place >= self.samples:
            # Padding.
            return self.parts[0].sample(0, self.parts[0].samples)
        # Negative numbers of epochs: no order of a corpus is drawn by them.
        mixed = permuted(place, self.samples, self.seed, -1 - epoch)
        index = bisect_right(self.ends, mixed)
        tokens = self.parts[index]
        share = self.shares[index]
        # The place in the corpus, counted over all epochs.
        own = epoch * share + mixed - (self.ends[index] - share)
        return tokens.sample(*divmod(own, tokens.samples))


class Blend:
    """Corpora that are opened, and their weights; for `mmm.trainer.load_text` what `Sources` is of one.

    Raises:
        ConfigError: some corpora are conversations and others not, or they have different tokenizers.
    """

    def __init__(self, sources: Sequence[Sources], weights: Sequence[float]) -> None:
        self.sources = sources
        self.weights = weights
        kinds = {isinstance(source.corpus.train, ChatText) for source in sources}
        if len(kinds) > 1:
            raise ConfigError("--text: some files are conversations and others text: train on one kind of them")
        hashes = [source.tokenizer and source.tokenizer.sha256 for source in sources]
        if len(set(hashes)) > 1:
            named = "; ".join(f"{source.corpus.source}: {source.tokenizer or 'unknown'}" for source in sources)
            raise ConfigError(f"--text_weights: the texts have different tokenizers ({named}): give one --tokenizer")
        self._repeats: list[str] = []

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.sources[0].tokenizer

    @property
    def vocab_size(self) -> int | None:
        return self.sources[0].vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        """Average number of bytes of a token; None if it is unknown of a corpus."""
        total = 0.0
        for source, weight in zip(self.sources, self.weights, strict=True):
            if source.bytes_per_token is None:
                return None
            total += weight * source.bytes_per_token
        return total / sum(self.weights)

    def tokens(
        self,
        seq_length: int,
        seed: int,
        vocab_size: int,
        pack: bool = False,
        document_mask: bool = False,
    ) -> tuple[Tokens, Tokens]:
        """As `Sources.tokens`. Validation is on the corpora with the same weights.

        Raises:
            ConfigError, DataError: as there, with the corpus; or the weight of one gives it no sequence.
        """
        pairs = []
        for source in self.sources:
            try:
                pairs.append(source.tokens(seq_length, seed, vocab_size, pack, document_mask))
            except DataError as error:
                raise DataError(f"--text {source.corpus.source}: {error}") from None
        training, validation = (BlendedTokens(parts, self.weights) for parts in zip(*pairs, strict=True))
        for source, tokens, share in zip(self.sources, training.parts, training.shares, strict=True):
            name = source.corpus.source
            if not share:
                raise DataError(
                    f"--text_weights: {name} gets none of the {training.samples} sequences of an epoch: use a larger "
                    "weight"
                )
            times = share / tokens.samples
            self._repeats.append(
                f"{name}: {share} of the {training.samples} sequences of an epoch, each of its own {times:.2g} times"
            )
        return training, validation

    def notes(self, seq_length: int) -> list[str]:
        """Remarks about the data for the start of a run."""
        return self._repeats + [note for source in self.sources for note in source.notes(seq_length)]

    def describe(self) -> dict[str, object]:
        """The facts about the data that a run's record keeps."""
        corpora = [source.corpus for source in self.sources]
        both = repr(([corpus.sha256 for corpus in corpora], list(self.weights)))
        named = [f"{weight:g} of {corpus.source}" for weight, corpus in zip(self.weights, corpora, strict=True)]
        return {
            "source": ", ".join(named),
            "files": sum(corpus.files for corpus in corpora),
            "corpora": [corpus.describe() for corpus in corpora],
            "sha256": hashlib.sha256(both.encode()).hexdigest(),
        }
