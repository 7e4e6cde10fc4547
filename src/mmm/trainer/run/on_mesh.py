"""The mesh of a run, and on it what to train."""

from __future__ import annotations

from torch import nn

from mmm.layout import Techniques
from mmm.models.experts import has_experts
from mmm.parallel import Mesh, Plan, apply, build_mesh, materialize
from mmm.parallel.initial_weights import InitName
from mmm.parallel.values import Values
from mmm.trainer.run.core import Run
from mmm.trainer.run.tables import sharded_model


def on_mesh(
    run: Run,
    model: nn.Module,
    plan: Plan,
    techniques: Techniques,
    seed: int | None = None,
    init: InitName | None = None,
    values: Values | None = None,
) -> tuple[Mesh, nn.Module]:
    """The mesh, and on it what to train, with its initial weights; log it. A collective.

    Args:
        seed: None: the run's. init, values: as for `materialize`.
    """
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    trained = apply(model, mesh, plan, run.precision, techniques)
    materialize(trained, run.device, run.seed if seed is None else seed, init=init, values=values)
    run.log.info("%s\n%s", mesh, sharded_model(trained), stacklevel=3)
    return mesh, trained
