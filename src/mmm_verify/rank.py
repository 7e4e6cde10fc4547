"""What one rank does: parallelize the model, take its step, and hand over what it saw."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmm_verify.observe import Observed, float64_by_default, observe
from mmm_verify.ranks.group import process_group
from mmm_verify.ranks.ranks import Rank
from mmm_verify.reference import SEED, Reference, make_batch, make_model, seed_all
from mmm_verify.subject import Subject, part_of
from mmm_verify.torch_private import tree_leaves


@dataclass(frozen=True)
class RankObserved:
    """What a rank saw.

    Attributes:
        parallel: of the parallel program. alone: of the plain model on this rank's batch, with no other rank; None if
            it cannot take it. batch: the tensors of its batch.
    """

    parallel: Observed
    alone: Observed | None
    batch: list[torch.Tensor]


def local_batch(subject: Subject, batch: Any, mesh: DeviceMesh, rank: int) -> Any:
    """A rank's batch of the global one."""
    if subject.local_batch_fn is not None:
        return subject.local_batch_fn(batch, mesh)
    return part_of(batch, subject.batch_part(rank), subject.parts)


def run_rank(
    rank: Rank, subject: Subject, reference: Reference, dropout: bool, timeout: float, types: bool = False
) -> RankObserved:
    """Take one step of the parallel program. A collective as far as the program is one; nothing else here is.

    Args:
        dropout: whether to leave it on; then without what the plain model does.
        types: as of `observe`.
    """
    # What FSDP2 advises of outputs that are views: it may be the program as it was given.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    with process_group(rank, torch.device("cpu"), timeout):
        mesh = init_device_mesh("cpu", tuple(subject.axes.values()), mesh_dim_names=tuple(subject.axes))
        batch = make_batch(subject)
        own = local_batch(subject, batch, mesh, rank.rank)
        alone = None if dropout else _alone(subject, reference, own)
        model = make_model(subject, reference.state, dropout, reference.evaluating and not dropout)
        seed_all(SEED)
        with float64_by_default():  # of modules that it makes itself
            result = subject.parallelize_fn(model, mesh)
        program = model if result is None else result
        parallel = observe(subject, program, own, mesh, step=not dropout, types=types)
        tensors = [leaf.clone() for leaf in tree_leaves(own) if isinstance(leaf, torch.Tensor)]
        return RankObserved(parallel, alone, tensors)


def _alone(subject: Subject, reference: Reference, own: Any) -> Observed | None:
    model = make_model(subject, reference.state, False, reference.evaluating)
    seed_all(SEED)
    try:
        return observe(subject, model, own, None, step=False)
    except Exception:  # such as half of a sequence, which the plain model cannot take: it only serves to explain
        return None
