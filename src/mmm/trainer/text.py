"""What the programs that train a Transformer on text have in common: flags, and everything decided before the ranks
meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch, Tokens
from mmm.errors import ConfigError, DataError
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, batch_sizes, local_value
from mmm.parallel.plan import Plan
from mmm.parallel.plans.transformer import check_transformer, transformer_plan
from mmm.trainer.options import RunOptions, TextOptions, TransformerOptions
from mmm.trainer.report import model_summary
from mmm.trainer.run import Run
from mmm.trainer.tasks import fitting_eval_batches


@dataclass(frozen=True, kw_only=True)
class TextProgramOptions(TransformerOptions, TextOptions, RunOptions):
    """Flags of a program that trains a Transformer on text."""


def check_validation_text(validation: Tokens, global_batch: int) -> None:
    """Raises DataError where the validation text has less than one global batch."""
    try:
        validation.steps_per_epoch(global_batch)
    except DataError as error:
        raise DataError(f"the text's last tenth, for validation: {error}") from None


def check_tokens(train: Tokens, validation: Tokens, global_batch: int) -> None:
    """Raises DataError where there is less text than one global batch, to train on or to validate by."""
    train.steps_per_epoch(global_batch)
    check_validation_text(validation, global_batch)


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """How often to judge by the validation text, and by how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def validates(self, step: int, steps: int) -> bool:
        """Whether to after this step."""
        return step == steps - 1 or (self.eval_every > 0 and (step + 1) % self.eval_every == 0)

    def check_validation(self, tokens: Tokens, global_batch: int) -> None:
        """Before anything is trained: whether there is a batch to judge by.

        Raises:
            UserError: a number that is too small; less validation text than one global batch.
        """
        if self.eval_every < 0:
            raise ConfigError(f"--eval_every {self.eval_every}: it must not be negative")
        if self.eval_batches < 1:
            raise ConfigError(f"--eval_batches {self.eval_batches}: it must be at least 1")
        check_validation_text(tokens, global_batch)


@dataclass(frozen=True)
class ResolvedText:
    """Everything that is decided before the ranks meet.

    Attributes:
        sizes: of the model. model: on the meta device: shapes without memory, so that no rank ever holds it whole.
        plan: how it is cut.
        batch, global_batch: samples of a step, of one data-parallel coordinate and of all. steps: of the run.
        tokens, validation: to train on, and to judge by. about_data: what the record says of them.
        sample: what a step's forward takes of one coordinate, (batch, seq) int64, on the meta device.
    """

    layout: Layout
    sizes: TransformerConfig
    model: Transformer
    plan: Plan
    batch: int
    global_batch: int
    steps: int
    tokens: Tokens
    validation: Tokens
    about_data: dict[str, object]
    sample: Tensor

    def summary(self) -> str:
        """The model, whole, before it is cut."""
        return model_summary(self.model, self.sample)

    def describe(self) -> dict[str, Any]:
        """What the record keeps."""
        return {
            "model": self.sizes,
            "global_batch_size": self.global_batch,
            "steps": self.steps,
        }


def resolve(options: TextProgramOptions, layout: Layout, default_batch: int, cp_style: str = "ring") -> ResolvedText:
    """Find the text, and work out model, batch and steps; needs no process group.

    Args:
        layout: fitted. default_batch: samples of a data-parallel coordinate, where no flag says. cp_style: with cp.

    Raises:
        UserError: anything that does not fit.
    """
    options.check()
    sizes = options.model_config(options.default_vocab())
    check_transformer(sizes, layout, options.seq_length, cp_style)
    batch, global_batch = batch_sizes(options.batch_size, options.global_batch_size, layout.dp, default_batch)
    tokens, validation, about = options.load(sizes.vocab_size, options.seed)
    steps = options.steps(tokens.steps_per_epoch(global_batch))
    if isinstance(options, ValidationOptions):
        options.check_validation(validation, global_batch)
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(batch, options.seq_length, dtype=torch.int64)
    plan = transformer_plan(sizes)
    return ResolvedText(layout, sizes, model, plan, batch, global_batch, steps, tokens, validation, about, sample)


@torch.no_grad()
def validate(run: Run, resolved: ResolvedText, batches: int, share: Callable[[Batch], Tensor]) -> float:
    """Mean loss over the first global batches of the validation text: the same samples on every mesh, every time. A
    collective.

    Args:
        share: of the samples of this rank's data-parallel coordinate → this rank's share of the loss of a global batch.
    """
    batches = fitting_eval_batches(run, resolved.validation, resolved.global_batch, batches)
    first = run.layout.dp_coordinate(run.rank.rank) * resolved.batch
    total = 0.0
    for step in range(batches):
        part = resolved.validation.batch(step, resolved.global_batch, first, resolved.batch).to(run.device)
        with loss_parallel():
            total += local_value(share(part))
    return run.global_sum(total) / batches
