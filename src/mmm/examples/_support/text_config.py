"""Flags of the examples that train a Transformer on text, and what they decide before their ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmm.data.text.byte_tokenizer import BYTES
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.tokens import TextTokens
from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques
from mmm.models.transformer import TransformerConfig
from mmm.runtime.ranks import whoami
from mmm.trainer.config.model import ExpertOptions, TransformerOptions
from mmm.trainer.config.resolve_text import resolve_text
from mmm.trainer.config.run import DEFAULT_BATCH_SIZE, DEFAULT_MAX_ITERS, RowOptions, check_counts
from mmm.trainer.config.spec import TextData, TrainingSpec
from mmm.trainer.config.training import OptimizerOptions, ValidationOptions


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions:
    """Where the text comes from. Files of tokens, and tokenizers: mmm.trainer.lm."""

    text: tuple[Path, ...] = ()
    """Files to train on, byte by byte. Default: the Python standard library's source."""
    seq_length: int = 128
    """Tokens a sample."""

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
class PlainTextConfig:
    """The groups of flags of an example that trains a Transformer on text."""

    model: TransformerOptions = TransformerOptions()
    data: PlainTextOptions = PlainTextOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    run: RowOptions = RowOptions()

    def sizes(self) -> TransformerConfig:
        """The model asked for."""
        return self.model.sizes(BYTES)


@dataclass(frozen=True, kw_only=True)
class TextConfig(PlainTextConfig):
    """The groups of flags of an example that also validates."""

    evaluation: ValidationOptions = ValidationOptions()


@dataclass(frozen=True, kw_only=True)
class RoutedOptions(ExpertOptions):
    """Routed experts, in place of feed-forward layers."""

    n_experts: int = 8
    """Experts in each layer."""

    def check(self) -> None:
        check_counts(n_experts=self.n_experts)
        super().check()


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A group of flags; that of the last base stands first in ``--help``."""

    experts: RoutedOptions = RoutedOptions()


def fit(**axes: int) -> Layout:
    """The layout of these axes for the ranks that there are. Raises LayoutError where their sizes do not multiply to
    it."""
    return Layout(**axes).fit(whoami().world_size)


def resolve_own(
    config: PlainTextConfig,
    layout: Layout,
    techniques: Techniques | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> TrainingSpec:
    """For an example that parallelizes the model itself: find the text, and decide on model, batch and steps; needs no
    process group.

    Args:
        layout: fitted to the number of ranks.
        techniques: that the example writes out.
        batch_size: samples a step, per data-parallel coordinate, where no flag says.
        max_iters: steps, where no flag says.

    Raises:
        UserError: anything that does not fit.
    """
    sizes = config.sizes()
    return resolve_text(
        config.run,
        sizes,
        layout,
        techniques or Techniques(),
        config.optimizer.optimizer,
        config.data.seq_length,
        partial(config.data.load, sizes.vocab_size, config.run.seed),
        evaluation=config.evaluation if isinstance(config, TextConfig) else None,
        default_batch_size=batch_size,
        default_max_iters=max_iters,
    )
