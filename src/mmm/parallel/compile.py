"""``torch.compile`` of the modules that a plan names, and whether PyTorch has really compiled them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout
from mmm.parallel.plan import Plan, find
from mmm.runtime.log import get_logger
from mmm.torch_private.dynamo import graph_counts, is_compiled, leave_out_graph_cache, wrap_compiled
from mmm.torch_private.groups import unfinished_type
from mmm.torch_private.operators import tree_map_only


def check_compile(layout: Layout, checkpointing: str) -> None:
    """Raises LayoutError where a compiled module would fail, or has not been shown to have correct gradients."""
    name = config_field("compile")
    if layout.tp > 1 and checkpointing != "none":
        raise LayoutError(
            f"{name} with tp {layout.tp} and activation checkpointing {checkpointing!r}: PyTorch 2.13 fails in "
            f"forward, or compiles nothing of these layers; leave one of the three out",
        )
    if layout.cp > 1:
        raise LayoutError(
            f"{name} with cp {layout.cp}: attention that communicates has not been shown to have the right gradients "
            f"when it is compiled; leave {name} out, or use cp 1",
        )


def check_compiled_experts(model: nn.Module, plan: Plan, checkpointing: str) -> None:
    """Raises ConfigError for checkpointed layers with experts, of which PyTorch would silently compile nothing."""
    if checkpointing != "none" and any(find(model, pattern) for pattern in plan.experts):
        raise ConfigError(
            f"{config_field('compile')} with activation checkpointing {checkpointing!r} of layers with experts: "
            f"experts are not compiled (how many tokens one has is known only once the router has chosen), and PyTorch "
            f"cannot leave a part of a checkpointed module uncompiled: nothing would be compiled; leave one of the two "
            f"out",
        )


def compile_modules(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Compile what the plan names for the layout, each module on its own, in place. Experts stay uncompiled."""
    # How many tokens an expert has is known only once the router has chosen: each number would be another graph.
    for pattern in plan.experts:
        for module in find(model, pattern):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    modules = {}
    for pattern in plan.compiled:
        for module in find(model, pattern):
            modules[module] = pattern
    get_logger().info("compile: %d modules (%s)", len(modules), ", ".join(plan.compiled) or "the plan names none")
    if layout.tp > 1:
        # A rank's graph has the rank's own shards in it. The cache on disk takes the graphs of all ranks for the same
        # one (pytorch#188390): a rank then silently computes another rank's part of a gradient.
        leave_out_graph_cache()
    for module, pattern in modules.items():
        module.compile()
        if layout.tp > 1:
            wrap_compiled(module, partial(_with_plain_tensors, pattern))


def _with_plain_tensors(pattern: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled module that waits for its inputs, and refuses DTensors.

    The first input may still be on its way between the ranks: the output of an embedding whose rows are sharded.
    PyTorch 2.13 silently computes no gradient for an input in this state (pytorch#191113). It does not wait for one
    that is inside a DTensor (pytorch#180614).
    """

    def refuse(x: DTensor) -> None:
        raise LayoutError(
            f"{config_field('compile')} with tp: the module {pattern} takes or returns a DTensor {tuple(x.shape)}, "
            f"for whose data PyTorch 2.13 may not wait; have the plan's `compiled` name a module that takes and "
            f"returns plain tensors, such as a whole layer",
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        tree_map_only(DTensor, refuse, (args, kwargs))
        args, kwargs = tree_map_only(unfinished_type(), _Arrived.apply, (args, kwargs))
        output = compiled(*args, **kwargs)
        tree_map_only(DTensor, refuse, output)
        return output

    return call


class _Arrived(torch.autograd.Function):
    """The result of a collective, once it has arrived. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        arrived: Tensor = x.trigger_wait()
        # Autograd writes into the tensor that is returned here. The one inside x stays as it is.
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class CompileReport:
    """Counts the graphs that PyTorch makes after this object: ``torch.compile`` silently runs a module uncompiled where
    it fails.

    Args:
        models: models with compiled modules in them, before those first run.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.modules = sum(is_compiled(module) for model in models for module in model.modules())
        self._graphs_before, self._operators_before = graph_counts()

    def log(self) -> None:
        """Log the counts, once the modules have run. Warn if nothing was compiled that should be."""
        graphs, operators = graph_counts()
        # Equal modules share a graph.
        graphs -= self._graphs_before
        operators -= self._operators_before
        if graphs:
            plural = "s" if graphs > 1 else ""
            get_logger().info(
                "compile: %d modules became %d graph%s of %d operators", self.modules, graphs, plural, operators
            )
        elif self.modules:
            get_logger().warning(
                "compile: PyTorch has compiled none of the %d modules, and runs them uncompiled; "
                "TORCH_LOGS=graph_breaks says why",
                self.modules,
            )
