"""A batch of tokens sharded over cp, for a loop of a test's own."""

from dataclasses import replace

from torch import Tensor

from mmm.data import Batch
from mmm.parallel.cp.ring import positions_of


def shard_batch(batch: Batch, coordinate: int, cp: int) -> tuple[Batch, Tensor]:
    """The tokens of a batch on a cp coordinate, of inputs and targets alike.

    Returns:
        That batch, (batch, seq / cp), whose count is still that of the global batch; and the positions of its tokens,
        (seq / cp,) int64, for the model: ``model(batch.inputs, positions)``.
    """
    seq = batch.inputs.shape[1]
    positions = positions_of(coordinate, cp, seq).to(batch.inputs.device)
    inputs = batch.inputs[:, positions]
    targets = batch.targets[:, positions]
    return replace(batch, inputs=inputs, targets=targets), positions
