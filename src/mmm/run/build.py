"""A model of a user's own on the run's layout, with the weights that it is to start with (docs/your-script.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.nn.experts import has_experts
from mmm.nn.meta import meta_parameters
from mmm.parallel import apply, build_mesh, loaded_values, materialize
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.initial_weights import InitName
from mmm.parallel.plan import Plan
from mmm.parallel.state_dict import StateDict
from mmm.run.run import Run
from mmm.run.tables import sharded_model
from mmm.runtime.seed import derived_seed, generator_states, restore_generators, seed_all


def build_model(
    run: Run,
    make: Callable[[], nn.Module],
    plan: Plan,
    *,
    init: InitName | None = None,
    weights: StateDict | None = None,
    name: str | None = None,
    **techniques: Any,
) -> nn.Module:
    """The model that `make` makes, sharded on the run's layout, with its initial weights. A collective.

    By default these are what the constructor puts into parameters and buffers; a model with a method ``init_rule`` has
    said by it how they start. The constructor runs on every rank, from the same seed, and so makes the full model in
    each rank's host memory; then each parameter in turn is sharded, and its full values are freed. With `init` or
    `weights` parameters have shapes alone until they are sharded: no rank ever holds more than its shards and a tensor.

    Args:
        init: ``by_name``: weights are drawn from the seed by their names instead, whatever the constructor makes of
            them (docs/models.md).
        weights: a state dict that they come from instead, read shard by shard: a file or a mapping
            (`mmm.parallel.loaded_values`).
        name: of the model, where there are several: what is drawn is a function of seed and name. None: models go on
            where the one before has stopped, so that two of them differ, as they do in a program without a mesh.
        techniques: fields of `mmm.parallel.Techniques`, such as ``data_parallel="ddp"``.

    Returns:
        What to call and optimize: the model, or for ddp, zero1 and zero2 a wrapper around it.

    Raises:
        UserError: what does not go together, as `mmm.parallel.apply`; weights that do not fit.
    """
    if init is not None and weights is not None:
        raise ConfigError(f"init {init!r} beside weights=: the weights come from one of them; leave the other out")
    dry = run.comm.dry  # which has no values
    keep = init is None and weights is None and not dry
    with nullcontext() if dry else _construction(run, name), meta_parameters(keep):
        model = make()
    how = Techniques(**techniques)
    values = None if dry or weights is None else loaded_values(model, weights)
    seed = run.seed
    if name is not None or run.unnamed_models:
        seed = derived_seed(seed, "model", name or run.unnamed_models)
    run.unnamed_models += name is None
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    trained = apply(model, mesh, plan, run.precision, how)
    materialize(trained, run.device, seed, init="by_name" if dry else init, values=values)
    run.log.info("%s\n%s", mesh, sharded_model(unwrapped(trained)), stacklevel=2)
    return trained


@contextmanager
def _construction(run: Run, name: str | None) -> Iterator[None]:
    """Inside, every rank draws the same numbers: a function of the seed and the name, or the models before. What is
    drawn outside goes on as if nothing had been."""
    before = generator_states(run.device)
    if name is not None:
        seed_all(derived_seed(run.seed, "model", name))
    elif run.constructor_states is None:
        seed_all(run.seed)
    else:
        restore_generators(run.device, run.constructor_states)
    try:
        yield
        if name is None:
            run.constructor_states = generator_states(run.device)
    finally:
        restore_generators(run.device, before)
