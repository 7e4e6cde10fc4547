"""A user's own model on the run's layout, with the weights that it starts with (docs/your-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.nn.experts import has_experts
from mmm.nn.meta import meta_parameters
from mmm.parallel import build_mesh, loaded_values, materialize, parallelize
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

    By default the weights are what the constructor puts into parameters and buffers; a model with a method
    ``init_rule`` says by it how they start. The constructor runs on every rank, from the same seed, so each rank's host
    memory holds the full model; then one parameter after another is sharded, and its full values are freed. With `init`
    or `weights` parameters have only shapes until they are sharded: a rank never holds more than its shards and one
    full tensor.

    Args:
        run: the run.
        make: makes the full model.
        plan: how the model is sharded.
        init: ``by_name``: draw the weights from the seed by their names, whatever the constructor makes of them
            (docs/models.md).
        weights: read the weights from this state dict instead, shard by shard: a file or a mapping
            (`mmm.parallel.loaded_values`).
        name: name of the model, if there are several: what is drawn is a function of seed and name. None: a model
            continues to draw where the one before has stopped, so two of them differ, as in a program without a mesh.
        techniques: fields of `mmm.parallel.Techniques`, such as ``data_parallel="ddp"``.

    Returns:
        What to call and optimize: the model, or for ddp, zero1 and zero2 a wrapper around it.

    Raises:
        UserError: what does not go together, as `mmm.parallel.parallelize`; weights that do not fit.
    """
    if init is not None and weights is not None:
        raise ConfigError(f"init {init!r} and weights=: the weights come from one of them; leave the other out")
    # Tensors of a dry run have no values.
    dry = run.comm.dry
    keeps_values = init is None and weights is None and not dry
    with nullcontext() if dry else _construction(run, name), meta_parameters(keeps_values):
        model = make()
    values = None if dry or weights is None else loaded_values(model, weights)
    # The first unnamed model has the run's own seed, as the model of a trainer has.
    seed = run.seed
    if name is not None or run.unnamed_models:
        seed = derived_seed(seed, "model", name or run.unnamed_models)
    run.unnamed_models += name is None
    mesh = build_mesh(
        run.layout,
        run.device.type,
        run.options.timeout,
        experts=has_experts(model),
    )
    trained = parallelize(model, mesh, plan, run.precision, Techniques(**techniques))
    materialize(trained, run.device, seed, init="by_name" if dry else init, values=values)
    run.log.info("%s\n%s", mesh, sharded_model(unwrapped(trained)), stacklevel=2)
    return trained


@contextmanager
def _construction(run: Run, name: str | None) -> Iterator[None]:
    """Inside, every rank draws the same random numbers. Outside, the generators continue as if nothing was drawn.

    The numbers depend on the seed and on the name; without a name, on the unnamed models before.
    """
    # Those of PyTorch (CPU and device), Python and NumPy.
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
