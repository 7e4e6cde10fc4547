"""Flags of the examples that train a Transformer on text, what they decide before their ranks meet, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.text_data import TextData
from mmm.data.text.tokens import BYTES, TextTokens
from mmm.errors import ConfigError
from mmm.examples._support.mistakes import for_a_mistake
from mmm.layout import Layout, Techniques
from mmm.models.llama.model import TransformerConfig
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.ranks import whoami
from mmm.trainer.config.model import TransformerOptions
from mmm.trainer.config.resolve_text import resolve_text
from mmm.trainer.config.run import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_ITERS,
    OptimizerOptions,
    RowOptions,
    ValidationOptions,
)
from mmm.trainer.job import Job


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
) -> Job:
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
    job = resolve_text(
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
    return for_a_mistake(config, job)


def text_steps(
    run: Run, job: Job, *, coordinate: int | None = None, place: Mapping[str, int] | None = None
) -> Iterator[Step]:
    """`Run.steps` of a program that trains on text: each has this rank's samples of the global batch.

    Args:
        coordinate: whose samples these are. Default: this rank's data-parallel coordinate.
        place: what a row says besides its step, such as ``{"stage": 1}``.
    """
    tokens = job.data.train
    samples = job.global_batch_size
    if coordinate is None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
    if place is None:
        run.log.info("%d steps of %d × %d tokens", job.steps, samples, tokens.seq_length, stacklevel=2)
    return run.steps(
        (job.local_batch(tokens, step, coordinate).to(run.device) for step in range(job.steps)),
        job.steps,
        samples=samples,
        tokens=samples * tokens.seq_length,
        eval_every=run.config.evaluation.eval_every if isinstance(run.config, TextConfig) else None,
        place=place,
    )


def validation_loss(run: Run, job: Job, local_loss: Callable[[Batch], Tensor], *modules: nn.Module) -> float:
    """The mean loss of the first global batches of the validation text. A collective.

    Args:
        local_loss: of the samples of this rank's data-parallel coordinate, this rank's part of the loss.
        modules: what this rank has of the model.
    """
    batches = job.validation_batches(run.config.evaluation.eval_batches, run.rank.rank, run.device)
    with run.evaluating(*modules), loss_parallel():  # under tp the logits stay sharded over the vocabulary
        return run.mean_loss(map(local_loss, batches))
