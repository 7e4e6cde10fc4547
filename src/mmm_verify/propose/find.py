"""All that is found for a model, on one process that is then gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.observe import float64_by_default
from mmm_verify.propose.code import Axes, write_code
from mmm_verify.propose.cuts import Cuts, find_cuts
from mmm_verify.propose.models import keep_no_cache
from mmm_verify.propose.report import describe
from mmm_verify.propose.tensor import TensorPlan, find_tensor_plan
from mmm_verify.propose.trace import trace
from mmm_verify.propose.units import Units, find_units
from mmm_verify.ranks.ranks import Rank, RanksFailed, fork_ranks
from mmm_verify.reference import make_batch, make_model
from mmm_verify.subject import Subject


@dataclass(frozen=True)
class Proposal:
    """A found plan.

    Attributes:
        units: for FSDP. tensor: for tp; None where the mesh has no such axis. cuts: for pp.
        code: the source of a module with ``parallelize(model, mesh)``.
    """

    units: Units
    tensor: TensorPlan | None = None
    cuts: Cuts = field(default_factory=Cuts)
    code: str = ""

    def __str__(self) -> str:
        return describe(self.units, self.tensor, self.cuts)


def find_plan(subjects: Sequence[Subject], name: str, timeout: float) -> Proposal:
    """What can be found for a model.

    Args:
        subjects: one a mesh, which have all else in common. name: of the model, for the code.

    Raises:
        UserError: the model, its batch or its step cannot be used, or the meshes have other axes.
    """
    axes, parts = axes_of(subjects)
    try:
        ((error, proposal),) = fork_ranks(_find, 1, subjects[0], name, axes, parts, timeout=timeout)
    except RanksFailed as failure:
        raise ConfigError(f"finding a plan: {str(failure).removeprefix('rank 0: ')}") from None
    if error is not None:
        raise error
    return proposal


def axes_of(subjects: Sequence[Subject]) -> tuple[Axes, int]:
    """The axes of meshes by what they are for, and the ranks over which matrices are sharded (1: none).

    Raises:
        ConfigError: a mesh has more than one axis besides those of data, or two meshes have different ones.
    """
    batch: dict[tuple[str, ...], None] = {}
    tensor: dict[tuple[str, int], None] = {}
    for subject in subjects:
        others = [axis for axis in subject.axes if axis not in subject.batch_axes]
        if len(others) > 1 or {"pp", "cp", "ep"} & set(others):
            mesh = ",".join(f"{axis}{size}" for axis, size in subject.axes.items())
            raise ConfigError(
                f"--mesh {mesh}: without --parallelize a plan is found for data parallelism and one axis of tensor "
                f"parallelism, such as dp2,tp2"
            )
        batch |= {subject.batch_axes: None} if subject.batch_axes else {}
        tensor |= {(axis, subject.axes[axis]): None for axis in others}
    if len(batch) > 1 or len(tensor) > 1:
        raise ConfigError("--mesh: one plan is found for all meshes, whose axes need the same names, and tp one size")
    axis, parts = next(iter(tensor), ("", 1))
    return Axes(next(iter(batch), ()), axis), parts


def _find(rank: Rank, subject: Subject, name: str, axes: Axes, parts: int) -> tuple[Exception | None, Proposal | None]:
    try:
        return None, propose(subject, name, axes, parts)
    except Exception as error:
        if not is_for_user(error):
            raise
        return type(error)(str(error)), None


def propose(subject: Subject, name: str, axes: Axes, parts: int) -> Proposal:
    """`find_plan` in this process, for a mesh of these axes, of which that of tp has `parts` ranks."""
    model = make_model(subject, None, dropout=False, evaluating=True)
    keep_no_cache(model)
    batch = make_batch(subject)
    with float64_by_default():
        return _propose(subject, model, batch, name, axes, parts)


def _propose(subject: Subject, model: nn.Module, batch: Any, name: str, axes: Axes, parts: int) -> Proposal:
    traced = trace(model, lambda model: subject.step(model, batch, None))
    if axes.batch and "" not in traced.calls:
        raise ConfigError(
            f"the step calls {' and '.join(dict.fromkeys(path.partition('.')[0] for path in traced.calls))} of "
            f"{type(model).__name__}, and never {type(model).__name__} itself: FSDP gathers parameters where the model "
            "is called. Call them in its forward, or give --parallelize"
        )
    units = find_units(traced)
    tensor = find_tensor_plan(traced, parts) if axes.tensor else None
    cuts = find_cuts(traced, units.blocks)
    code = write_code(model, name, axes, units if axes.batch else None, tensor)
    return Proposal(units, tensor, cuts, code)
