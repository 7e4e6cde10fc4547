"""What a program that trains a Transformer on text decides before its ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmm.data import Tokens
from mmm.errors import ConfigError, DataError, LayoutError
from mmm.layout import batch_sizes
from mmm.models.transformer import Transformer
from mmm.parallel.rules import check_transformer
from mmm.runtime.ranks import whoami
from mmm.trainer.config.resolve import Resolved

if TYPE_CHECKING:
    from mmm.data.text.byte_tokenizer import Tokenizer


@dataclass(frozen=True)
class TextData:
    """Tokens to train on, tokens to validate on, and what the record says of them.

    Attributes:
        bytes_per_token: of the text to validate on; None where nobody knows. tokenizer: None where nobody knows.
    """

    train: Tokens
    validation: Tokens
    about: dict[str, object]
    bytes_per_token: float | None = None
    tokenizer: Tokenizer | None = None

    def describe(self) -> dict[str, object]:
        return self.about

    def check(self, global_batch_size: int) -> int:
        """Steps of an epoch.

        Raises:
            DataError: there is less text than one global batch, to train on or to validate on.
        """
        steps = self.train.steps_per_epoch(global_batch_size)
        try:
            self.validation.steps_per_epoch(global_batch_size)
        except DataError as error:
            raise DataError(f"the text's last tenth, for validation: {error}") from None
        return steps


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def validates(self, step: int, steps: int) -> bool:
        """Whether to after this step."""
        return step == steps - 1 or (self.eval_every > 0 and (step + 1) % self.eval_every == 0)

    def check_validation(self) -> None:
        """Raises ConfigError for a number that is too small."""
        if self.eval_every < 0:
            raise ConfigError(f"--eval_every {self.eval_every}: it must not be negative")
        if self.eval_batches < 1:
            raise ConfigError(f"--eval_batches {self.eval_batches}: it must be at least 1")


def resolve_own(options: Any) -> Resolved:
    """For a program that parallelizes the model itself: find the text, and decide on layout, model, batch and steps;
    needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    options.check()
    layout = options.layout(whoami().world_size)
    sizes = options.model_config(options.default_vocab())
    check_transformer(sizes, layout, options.seq_length, options.techniques().cp_style)
    local_batch_size, global_batch_size = batch_sizes(
        options.batch_size, options.global_batch_size, layout.dp, options.default_batch_size
    )
    data = options.load(sizes.vocab_size, options.seed)
    notes = []
    if isinstance(options, ValidationOptions):
        options.check_validation()
        steps_per_epoch, there = data.check(global_batch_size), data.validation.steps_per_epoch(global_batch_size)
        if there < options.eval_batches:
            asked = f"{there} global batches instead of {options.eval_batches}"
            notes.append(f"validation: {asked}, all that the text has")
    else:
        steps_per_epoch = data.train.steps_per_epoch(global_batch_size)
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(local_batch_size, options.seq_length, dtype=torch.int64)
    return Resolved(
        options=options,
        layout=layout,
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=options.steps(steps_per_epoch),
        notes=tuple(notes),
    )


def check_own_kv_heads(resolved: Resolved) -> None:
    """For an example that shards key/value heads itself: raises LayoutError where ranks would have to share them."""
    heads, tp = resolved.sizes.n_kv_heads, resolved.layout.tp
    if heads % tp:
        text = f"n_kv_heads {heads} is not divisible by tp {tp}"
        raise LayoutError(f"{text}: use a divisor, or mmm.trainer.lm, whose ranks can share a key/value head")
