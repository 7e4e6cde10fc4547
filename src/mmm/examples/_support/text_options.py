"""Flags of the examples that train a Transformer on text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmm.data.text.byte_tokenizer import BYTES
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.tokens import TextTokens
from mmm.errors import ConfigError
from mmm.trainer.config.options import BreakOptions, RunOptions, TensorParallelOptions, Unused
from mmm.trainer.config.resolve_text import TextData, ValidationOptions
from mmm.trainer.config.transformer_options import TransformerOptions


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions:
    """Flags of where an example's text comes from. Files of tokens, and tokenizers: ``mmm.trainer.lm``."""

    text: tuple[Path, ...] = ()
    """Files to train on, byte by byte. Default: the Python standard library's source."""
    seq_length: int = 128
    """Tokens a sample."""

    def default_vocab(self) -> int:
        """Vocabulary of the data: bytes."""
        return BYTES

    def load(self, vocab_size: int, seed: int) -> TextData:
        """The tokens.

        Raises:
            ConfigError: the vocabulary is too small.
            DataError: a text cannot be used.
        """
        if vocab_size < BYTES:
            raise ConfigError(f"--vocab_size {vocab_size}: text has {BYTES} different bytes; use at least {BYTES}")
        corpus: Corpus = read_text_files(self.text) if self.text else standard_library()
        train = TextTokens(corpus.train, self.seq_length, seed, shuffle=True)
        validation = TextTokens(corpus.validation, self.seq_length, seed, shuffle=False)
        return TextData(train, validation, {"dataset": "text", **corpus.describe()}, bytes_per_token=1.0)


@dataclass(frozen=True, kw_only=True)
class PlainTextProgramOptions(TransformerOptions, PlainTextOptions, RunOptions):
    """Flags of a program that trains a Transformer on text."""


@dataclass(frozen=True, kw_only=True)
class TextExampleOptions(TensorParallelOptions, PlainTextProgramOptions, ValidationOptions, BreakOptions):
    """Flags of an example that trains a Transformer on text: its sizes, and its run."""

    compile: Unused[bool] = False
