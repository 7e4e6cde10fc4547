"""Finds everything that can be found for a model, in one process that ends afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmm_verify.dtypes import by_default
from mmm_verify.errors import ConfigError
from mmm_verify.plain import make_batch, make_model
from mmm_verify.propose.code import Axes, write_code
from mmm_verify.propose.models import keep_no_cache
from mmm_verify.propose.report import describe
from mmm_verify.propose.tensor import TensorPlan, find_tensor_plan
from mmm_verify.propose.trace import trace
from mmm_verify.propose.units import Units, find_units
from mmm_verify.ranks.ranks import fork_one
from mmm_verify.subject import Subject


@dataclass(frozen=True)
class Proposal:
    """A plan that was found.

    Attributes:
        units: units for FSDP.
        tensor: plan for tensor parallelism; None if the mesh has no such axis.
        code: source of a module with ``parallelize(model, mesh)``.
    """

    units: Units
    tensor: TensorPlan | None = None
    code: str = ""

    def __str__(self) -> str:
        return describe(self.units, self.tensor)


def find_plan(subjects: Sequence[Subject], name: str, timeout: float) -> Proposal:
    """Find a plan for a model.

    Args:
        subjects: one subject per mesh; everything else is the same in all of them.
        name: name of the model, for the code.
        timeout: seconds that it may take.

    Raises:
        UserError: the model, its batch or its step cannot be used, or the meshes do not have the same axes.
    """
    axes, n_ranks = axes_of(subjects)
    # In a process of its own: the user's code may crash, or change what a later model would find.
    proposal: Proposal = fork_one("finding a plan", propose, subjects[0], name, axes, n_ranks, timeout=timeout)
    return proposal


def axes_of(subjects: Sequence[Subject]) -> tuple[Axes, int]:
    """What the axes of the meshes are for, and the number of ranks over which matrices are sharded (1: they are not).

    Raises:
        ConfigError: a mesh has more than one axis besides those of data, or two meshes have different ones.
    """
    # What the meshes have, each once.
    batch: set[tuple[str, ...]] = set()
    tensor: set[tuple[str, int]] = set()
    for subject in subjects:
        others = [axis for axis in subject.axes if axis not in subject.batch_axes]
        if len(others) > 1 or {"pp", "cp", "ep"} & set(others):
            mesh = ",".join(f"{axis}{size}" for axis, size in subject.axes.items())
            raise ConfigError(
                f"--mesh {mesh}: without --parallelize a plan is found for data parallelism and one axis of tensor "
                f"parallelism, such as dp2,tp2"
            )
        if subject.batch_axes:
            batch.add(subject.batch_axes)
        for axis in others:
            tensor.add((axis, subject.axes[axis]))
    if len(batch) > 1 or len(tensor) > 1:
        raise ConfigError("--mesh: one plan is found for all meshes, whose axes need the same names, and tp one size")
    # Each has one element, or none.
    batch_axes = next(iter(batch), ())
    tensor_axis, n_ranks = next(iter(tensor), ("", 1))
    return Axes(batch_axes, tensor_axis), n_ranks


def propose(subject: Subject, name: str, axes: Axes, n_ranks: int) -> Proposal:
    """Find a plan in this process.

    Args:
        subject: the model, its batch and its step.
        name: name of the model, for the code.
        axes: what the axes of the mesh are for.
        n_ranks: number of ranks on the axis of tensor parallelism.
    """
    # In evaluation mode: a forward must give the same each time.
    model = make_model(subject, None, dropout=False, evaluating=True)
    keep_no_cache(model)
    batch = make_batch(subject)
    with by_default(torch.float64):
        return _propose(subject, model, batch, name, axes, n_ranks)


def _propose(
    subject: Subject,
    model: nn.Module,
    batch: Any,
    name: str,
    axes: Axes,
    n_ranks: int,
) -> Proposal:
    """See `propose`."""
    step = lambda model: subject.step(model, batch, None)  # noqa: E731
    traced = trace(model, step)
    # "" is the path of the model itself.
    if axes.batch and "" not in traced.calls:
        model_name = type(model).__name__
        called = dict.fromkeys(path.partition(".")[0] for path in traced.calls)
        listed = " and ".join(called)
        raise ConfigError(
            f"the step calls {listed} of {model_name}, and never {model_name} itself: FSDP gathers parameters where "
            "the model is called. Call them in its forward, or give --parallelize"
        )
    units = find_units(traced)
    tensor = None
    if axes.tensor:
        tensor = find_tensor_plan(traced, n_ranks)
        # Norms over the channels of all ranks: their channels are gathered, and what they join is looked for again.
        norms: set[str] = set()
        while not tensor.mixing <= norms:
            norms |= tensor.mixing
            tensor = find_tensor_plan(trace(model, step, norms), n_ranks)
    # Without an axis of data the units are only described.
    code = write_code(model, name, axes, units=units if axes.batch else None, plan=tensor)
    return Proposal(units, tensor, code)
