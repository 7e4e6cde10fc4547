"""Resume on another mesh: what a run is, besides its weights.

A run has trained on two ranks with FSDP and AdamW, has halved its learning rate, and has saved a checkpoint by
torch.distributed.checkpoint (DCP)::

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

It continues on four ranks, which have other shards. DCP loads into tensors that are there already, and knows which
shard of each is local. What it has loaded has to get into the model and the optimizer. The next losses are then those
of the run that was never stopped.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmm.comparison import relative_error
from mmm.runtime.log import ignore_views
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import Rank
from mmm_lab.exercises.check import TIMEOUT, Result, failure
from mmm_lab.exercises.tools import Net, make_numbers
from mmm_verify.ranks import RanksFailed, fork_ranks
from mmm_verify.reference import TOLERANCE

FUNCTION = "load"
TEMPLATE = '''
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def load(model, optimizer, folder):
    """Load the checkpoint in `folder` into `model` and `optimizer`, in place.

    Args:
        model: sharded by fully_shard over four ranks, with weights of its own.
        optimizer: AdamW, which has made no step.
        folder: the checkpoint's.
    """
    raise NotImplementedError
'''
STEPS = 3  # before the checkpoint, and after it


def _program(rank: Rank, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model under FSDP over all ranks, and its optimizer."""
    # All ranks draw the same weights, of which each keeps its shards.
    torch.manual_seed(seed)
    model = Net().double()
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def _train(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Train for some steps. Returns their losses, the means over all ranks."""
    losses = []
    for step in range(first, first + STEPS):
        # The batch depends only on the step: two ranks and four share the same samples out.
        torch.manual_seed(1000 + step)
        inputs, targets = make_numbers()
        inputs = inputs.double().chunk(rank.world_size)[rank.rank]
        targets = targets.double().chunk(rank.world_size)[rank.rank]
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Ranks have the same number of samples: the mean of their means is that of the batch.
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / rank.world_size)
    return losses


def _before(rank: Rank, folder: str) -> list[float]:
    """Train, save, and continue. Returns the losses after the checkpoint."""
    with process_group(rank, torch.device("cpu"), 2 * TIMEOUT), ignore_views():
        model, optimizer = _program(rank, 0)
        _train(rank, model, optimizer, 0)
        # An answer that loads only tensors misses this: get_state_dict returns numbers as copies.
        for group in optimizer.param_groups:
            group["lr"] /= 2
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        return _train(rank, model, optimizer, STEPS)


def _after(rank: Rank, folder: str, load: Callable[..., Any]) -> list[float]:
    """Begin with other weights, load, and continue."""
    with process_group(rank, torch.device("cpu"), 2 * TIMEOUT), ignore_views():
        model, optimizer = _program(rank, 1)
        load(model, optimizer, folder)
        return _train(rank, model, optimizer, STEPS)


def check(load: Callable[[nn.Module, torch.optim.Optimizer, str], None]) -> Result:
    """Compare the losses after the checkpoint, on two ranks that continued and on four that have loaded it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "checkpoint")
        expected, *_ = fork_ranks(_before, 2, folder, timeout=TIMEOUT)
        try:
            losses, *_ = fork_ranks(_after, 4, folder, load, timeout=TIMEOUT)
        except RanksFailed as error:
            return Result(False, failure(FUNCTION, error, error.details))
    # The first loss is computed with the loaded weights, the others after steps of the optimizer.
    why = "the weights are not those of the checkpoint"
    pairs = zip(losses, expected, strict=True)
    for step, (loss, expected_loss) in enumerate(pairs, STEPS):
        # Written so that NaN does not pass.
        if not relative_error(loss, expected_loss) <= TOLERANCE:
            text = f"step {step}: loss {loss:.9g}, without the stop {expected_loss:.9g}: {why}"
            return Result(False, text)
        why = "the weights are right, and what the optimizer has to remember is not: moments, step, lr"
    return Result(True, f"the same losses on four ranks as on the two that went on: {losses[-1]:.9g}")
