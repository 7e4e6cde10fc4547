"""Everything that a run needs, decided before its ranks meet: what does not fit is refused by each rank alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmm.data import Batch, Tokens
from mmm.errors import DataError
from mmm.layout import Layout, Techniques


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run needs that has no model of the package's.

    Attributes:
        layout: fitted to the number of ranks.
        data: to train on, and to evaluate on; None where there are none, or only the model is summarized.
        notes: what was chosen where no flag says.
    """

    layout: Layout
    data: Any = None
    notes: tuple[str, ...] = ()

    def describe_data(self) -> Mapping[str, Any] | None:
        """What the record keeps of the data. Its name (``dataset``) and hash (``sha256``) have to be equal on all
        ranks; its ``note`` is for the user."""
        return None if self.data is None else self.data.describe()


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(RunSpec):
    """What a run of a model needs.

    Attributes:
        sizes: of the model.
        model: an `nn.Module` on the meta device, shapes without memory.
        sample: what a step's forward takes of one data-parallel coordinate, (local batch, …), on the meta device.
        steps: of the run.
        techniques: on the layout.
        optimizer: its name.
        lr: its learning rate, as scaled; None where it is that of the flag.
    """

    sizes: Any
    model: Any
    sample: Tensor
    steps: int
    techniques: Techniques
    optimizer: str
    lr: float | None = None

    @property
    def local_batch_size(self) -> int:
        """Samples of a step, of one data-parallel coordinate."""
        return len(self.sample)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, of all data-parallel coordinates."""
        return len(self.sample) * self.layout.dp

    def summary(self) -> str:
        """The full model, before it is sharded."""
        return model_summary(self.model, self.sample)

    def describe(self) -> dict[str, Any]:
        """What the record keeps."""
        scaled = {} if self.lr is None else {"scaled_lr": self.lr}
        return {"model": self.sizes, "global_batch_size": self.global_batch_size, "steps": self.steps, **scaled}

    def local_batch(self, tokens: Tokens, step: int, coordinate: int) -> Batch:
        """The samples of a step of a data-parallel coordinate."""
        return tokens.batch(step, self.global_batch_size, coordinate * self.local_batch_size, self.local_batch_size)

    def validation_batches(
        self, batches: int, rank: int, device: torch.device, tokens: Tokens | None = None
    ) -> Iterator[Batch]:
        """A rank's samples of the first global batches of the validation text, or of `tokens`, on its device: the same
        on every mesh, every time. Where the text has fewer, all of them."""
        tokens, coordinate = tokens or self.data.validation, self.layout.dp_coordinate(rank)
        for step in range(min(batches, tokens.steps_per_epoch(self.global_batch_size))):
            yield self.local_batch(tokens, step, coordinate).to(device)


@dataclass(frozen=True)
class TextData:
    """Tokens to train on, tokens to validate on, and what the record says of them.

    Attributes:
        bytes_per_token: of the text to validate on; None where nobody knows.
        tokenizer: a `mmm.data.text.byte_tokenizer.Tokenizer`; None where nobody knows.
    """

    train: Tokens
    validation: Tokens
    about: dict[str, object]
    bytes_per_token: float | None = None
    tokenizer: Any = None

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


def model_summary(model: nn.Module, inputs: Tensor) -> str:
    """torchinfo's summary of a model on the meta device, which costs no memory and next to no time.

    Args:
        inputs: what forward takes, on the meta device.
    """
    import torchinfo
    from torch.utils.flop_counter import FlopCounterMode

    model = copy.deepcopy(model).to("meta")  # torchinfo moves what it is given, buffers with values as well
    columns = ("output_size", "num_params")
    # torchinfo's own count is of a token where a layer sees many. Attention by matrix products: the counter does not
    # know every fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        text = str(torchinfo.summary(model, input_data=inputs, depth=2, col_names=columns, verbose=0, device="meta"))
    count = f"{counter.get_total_flops() // 2:,}, of forward's matrix products and convolutions"
    return re.sub(r"Total mult-adds .*", f"Total mult-adds: {count}", text)
