"""``torch.compile`` of the modules that a plan names, and whether PyTorch has really compiled them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout
from mmm.parallel.plan import Plan, find
from mmm.runtime.log import get_logger
from mmm.torch_private.dynamo import graph_counts, is_compiled


def check_compile(plan: Plan, layout: Layout) -> None:
    """Raises LayoutError where no module of the plan has correct gradients when it is compiled on that layout."""
    name = config_field("compile")
    if layout.tp > 1 and plan.compiled and not plan.compiled_with_tp:
        raise LayoutError(
            f"{name} with tp {layout.tp}: PyTorch compiles the layers of this model, which take DTensors there, to "
            f"silently wrong gradients; leave {name} out, or use tp 1",
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
    patterns = plan.compiled_with_tp if layout.tp > 1 else plan.compiled
    modules = [module for pattern in patterns for module in find(model, pattern)]
    get_logger().info("compile: %d modules (%s)", len(modules), ", ".join(patterns) or "the plan names none")
    for module in modules:
        module.compile()


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
