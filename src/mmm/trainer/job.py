"""What a run is, decided before its ranks meet: one flat, frozen object. Each rank alone refuses what does not fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmm.data import Batch, Tokens
from mmm.layout import Layout, Techniques

if TYPE_CHECKING:
    from mmm.parallel.partition import Partition
    from mmm.parallel.plan import Plan
    from mmm.trainer.config import Optimizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is. A program with a model of its own has a layout, and perhaps data, and no more.

    Attributes:
        layout: fitted to the number of ranks.
        techniques: on the layout.
        sizes: of the model.
        model: an `nn.Module` on the meta device, shapes without memory.
        sample: what a step's forward takes of one data-parallel coordinate, (local batch, …), on the meta device.
        plan: how the package shards the model. None where the program parallelizes it itself.
        partition: of the model into pipeline stages. None likewise.
        data: to train on, and to evaluate on. None where there are none, or only the model is summarized.
        steps: of the run.
        optimizer: its name.
        lr: its learning rate, scaled for the global batch. None where no flag scales it.
        gamma: factor of the learning rate after each epoch. None where a schedule decides.
        balance_rate: how far a step moves the bias of an expert that had more, or less, than the mean load.
        weights: that the model starts from. None where they are drawn.
        bos: tokens that begin a text.
        eos: tokens that end one.
        notes: what was chosen where no flag says.
    """

    layout: Layout
    techniques: Techniques = Techniques()
    sizes: Any = None
    model: Any = None
    sample: Tensor = None  # type: ignore[assignment]
    plan: Plan = None  # type: ignore[assignment]
    partition: Partition = None  # type: ignore[assignment]
    data: Any = None
    steps: int = 0
    optimizer: str = ""
    lr: float = None  # type: ignore[assignment]
    gamma: float = None  # type: ignore[assignment]
    balance_rate: float = 0.0
    weights: Any = None
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

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
        """What the record keeps of a model of the package's."""
        facts = {"model": self.sizes, "global_batch_size": self.global_batch_size, "steps": self.steps}
        if self.lr is not None:
            facts["scaled_lr"] = self.lr
        if self.gamma is not None:
            facts["gamma"] = self.gamma
        return facts

    def describe_data(self) -> Mapping[str, Any] | None:
        """What the record keeps of the data. Its name (``dataset``) and hash (``sha256``) have to be equal on all
        ranks; its ``note`` is for the user."""
        return None if self.data is None else self.data.describe()

    def local_batch(self, tokens: Tokens, step: int, coordinate: int) -> Batch:
        """The samples of a step of a data-parallel coordinate."""
        return tokens.batch(step, self.global_batch_size, coordinate * self.local_batch_size, self.local_batch_size)

    def validation_batches(
        self, batches: int, rank: int, device: torch.device, tokens: Tokens | None = None
    ) -> Iterator[Batch]:
        """A rank's samples of the first global batches of the validation text, or of `tokens`, on its device: the same
        on every mesh, every time. Where the text has fewer, all of them."""
        if tokens is None:
            tokens = self.data.validation
        coordinate = self.layout.dp_coordinate(rank)
        for step in range(min(batches, tokens.steps_per_epoch(self.global_batch_size))):
            yield self.local_batch(tokens, step, coordinate).to(device)


def with_optimizer(job: Job, flags: Optimizer, default_base: int) -> Job:
    """The job with the optimizer that the flags ask for, and the learning rate of its global batch.

    Args:
        default_base: samples, where no flag says which global batch --lr is for.
    """
    lr, notes = flags.scaled(job.global_batch_size, default_base)
    return replace(job, optimizer=flags.optimizer, lr=lr, notes=(*job.notes, *notes))


def model_summary(model: nn.Module, inputs: Tensor) -> str:
    """torchinfo's summary of a model on the meta device, which costs no memory and next to no time.

    Args:
        inputs: what forward takes, on the meta device.
    """
    import torchinfo
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = copy.deepcopy(model).to("meta")  # torchinfo moves what it is given, buffers with values as well
    columns = ("output_size", "num_params")
    # torchinfo's own count is of a token where a layer sees many. Attention by matrix products: the counter does not
    # know every fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        text = str(torchinfo.summary(model, input_data=inputs, depth=2, col_names=columns, verbose=0, device="meta"))
    count = f"{counter.get_total_flops() // 2:,}, of forward's matrix products and convolutions"
    return re.sub(r"Total mult-adds .*", f"Total mult-adds: {count}", text)
