"""What a run is, decided before its ranks meet: one flat, frozen object. Each rank refuses what does not fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmm.data import Batch, Tokens
from mmm.layout import Layout, Techniques


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is. A program that parallelizes its model itself has neither plan nor partition; one that trains
    nothing has only a layout, and perhaps data.

    Attributes:
        layout: the layout, fitted to the number of ranks.
        techniques: how the model is parallelized on the layout.
        sizes: sizes of the model.
        model: an `nn.Module` on the meta device: shapes without memory.
        sample: what one forward of a data-parallel coordinate takes in a step, (local batch, …), on the meta device.
        plan: how the package shards the model, a `mmm.parallel.Plan`.
        partition: how the model is split into pipeline stages, a `mmm.parallel.partition.Partition`.
        data: data to train on, and to evaluate on. None if there are none, or the model is only summarized.
        steps: number of steps of the run.
        optimizer: name of the optimizer.
        lr: learning rate of the optimizer, for the global batch. 0 if the program does not say.
        gamma: factor of the learning rate after each epoch. 0 if a schedule decides.
        balance_rate: how far a step moves the bias of an expert with more, or less, than the mean load.
        weights: weights that the model starts from. None if they are drawn.
        lora: the small matrices that are trained in place of the model's own, a `mmm.nn.lora.LoRA`. None if all
            parameters are trained.
        metadata: what is known about a language model besides its sizes, a `ModelMetadata`; None for other models.
        notes: sentences on what was chosen where no flag says so.
    """

    layout: Layout
    techniques: Techniques = Techniques()
    sizes: Any = None
    model: Any = None
    sample: Any = None
    plan: Any = None
    partition: Any = None
    data: Any = None
    steps: int = 0
    optimizer: str = ""
    lr: float = 0.0
    gamma: float = 0.0
    balance_rate: float = 0.0
    weights: Any = None
    lora: Any = None
    metadata: Any = None
    notes: Sequence[str] = ()

    @property
    def local_batch_size(self) -> int:
        """Samples of a step on one data-parallel coordinate."""
        return len(self.sample)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step on all data-parallel coordinates together."""
        return len(self.sample) * self.layout.dp

    def summary(self) -> str:
        """A table of the full model, before it is sharded."""
        return model_summary(self.model, self.sample)

    def describe(self) -> dict[str, Any]:
        """What the record keeps of a model of the package's."""
        facts = {"model": self.sizes, "global_batch_size": self.global_batch_size, "steps": self.steps}
        if self.lr:
            facts["scaled_lr"] = self.lr
        if self.gamma:
            facts["gamma"] = self.gamma
        if self.lora is not None:
            facts["lora"] = self.lora
        return facts

    def describe_data(self) -> Mapping[str, Any] | None:
        """What the record keeps of the data; None if there are none.

        Name (``dataset``) and hash (``sha256``) have to be the same on all ranks; ``note`` is for the user.
        """
        return None if self.data is None else self.data.describe()

    def local_batch(self, tokens: Tokens, step: int, coordinate: int) -> Batch:
        """The samples that a data-parallel coordinate takes in a step."""
        first_sample = coordinate * self.local_batch_size
        return tokens.batch(step, self.global_batch_size, first_sample, self.local_batch_size)

    def validation_batches(self, batches: int, rank: int, tokens: Tokens) -> Iterator[Batch]:
        """Yield a rank's samples of the first global batches of a text: the same on every mesh, every time.

        Args:
            batches: number of global batches. If the text has fewer, all of them.
            rank: the rank.
            tokens: the text.
        """
        coordinate = self.layout.dp_coordinate(rank)
        available = tokens.steps_per_epoch(self.global_batch_size)
        for step in range(min(batches, available)):
            yield self.local_batch(tokens, step, coordinate)


def model_summary(model: nn.Module, inputs: Tensor) -> str:
    """torchinfo's summary of a model on the meta device, which costs no memory and next to no time.

    Args:
        model: the model.
        inputs: what forward takes, on the meta device.
    """
    import torchinfo
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # torchinfo moves what it is given, including buffers with values.
    model = copy.deepcopy(model).to("meta")
    columns = ("output_size", "num_params")
    # torchinfo's own count takes one token where a layer sees many, so PyTorch counts. It does not know every fused
    # kernel of attention, so attention is computed by matrix products here.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        info = torchinfo.summary(model, input_data=inputs, depth=2, col_names=columns, verbose=0, device="meta")
    # A multiply-add is two FLOPs.
    count = f"{counter.get_total_flops() // 2:,}, of forward's matrix products and convolutions"
    return re.sub(r"Total mult-adds .*", f"Total mult-adds: {count}", str(info))
