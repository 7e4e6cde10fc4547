"""What one rank does: it parallelizes the model, takes its steps, and returns what it saw."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmm_verify.adapter import blamed, inside_environment
from mmm_verify.dtypes import by_default
from mmm_verify.observe import Observed, observe
from mmm_verify.plain import SEED, make_batch, make_model, seed_all
from mmm_verify.ranks.group import process_group
from mmm_verify.ranks.ranks import Rank
from mmm_verify.reference import Reference
from mmm_verify.subject import Subject, part_of
from mmm_verify.torch_private import averaged_by_fsdp, tensors_in


@dataclass(frozen=True)
class RankObserved:
    """What a rank saw.

    Attributes:
        parallel: the steps of the parallel program.
        alone: the plain model's step on this rank's batch, without other ranks; None if it cannot take that batch.
        batch: the tensors of this rank's batch.
    """

    parallel: Observed
    alone: Observed | None
    batch: list[torch.Tensor]


def local_batch(subject: Subject, batch: Any, mesh: DeviceMesh, rank: int) -> Any:
    """The batch of one rank, taken from the global batch."""
    if subject.local_batch_fn is not None:
        return subject.local_batch_fn(batch, mesh)
    return part_of(batch, subject.part_index(rank), subject.n_parts)


def run_rank(
    rank: Rank, subject: Subject, reference: Reference, dropout: bool, timeout: float, dtypes: bool = False
) -> RankObserved:
    """Run the parallel program on this rank. The program's own collectives are the only communication.

    Args:
        dropout: whether dropout stays on. Then only the first step is taken, and the plain model is not run.
        timeout: seconds that a collective may take.
        dtypes: whether to count functions by their results' types; see `observe`.
    """
    # FSDP2's advice about outputs that are views may be about the program as the user wrote it.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    with process_group(rank, torch.device(subject.device, rank.rank), timeout), averaged_by_fsdp():
        mesh = init_device_mesh(subject.device, tuple(subject.axes.values()), mesh_dim_names=tuple(subject.axes))
        adapter = subject.adapter
        # With dropout on, the model has to be in training mode, whatever mode it was compared in.
        evaluating = reference.evaluating and not dropout
        with inside_environment(adapter, rank.rank, None):
            # Every rank makes the same global batch, from the same seed, and takes its own part of it.
            batch = make_batch(subject)
            own = local_batch(subject, batch, mesh, rank.rank)
            alone = None
            if not dropout:
                alone = _run_alone(subject, reference, own)
            model = make_model(subject, reference.state, dropout, evaluating)
        with inside_environment(adapter, rank.rank, mesh):
            seed_all(SEED)
            # Modules that the user's function makes itself are then of the same type.
            with by_default(subject.dtype):
                program = subject.parallelize_fn(model, mesh)
            if program is None:
                program = model
            parallel = observe(subject, program, own, mesh, step=not dropout, dtypes=dtypes)
        if adapter.name is not None:
            with blamed("name"):
                parallel = parallel.renamed(partial(adapter.name, rank.rank))
        tensors = [tensor.clone() for tensor in tensors_in(own)]
        return RankObserved(parallel, alone, tensors)


def _run_alone(subject: Subject, reference: Reference, own: Any) -> Observed | None:
    """Run the plain model on this rank's batch: a wrong rank often computes just that."""
    model = make_model(subject, reference.state, False, reference.evaluating)
    seed_all(SEED)
    try:
        return observe(subject, model, own, None, step=False)
    # The plain model may not take this batch, such as half of a sequence. It only serves to explain a difference.
    except Exception:
        return None
