"""Private names of torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

# Private: torch._dynamo, seen in 2.10 to 2.14. Public replacement: torch.compiler, if it had these functions.
DYNAMO = "torch._dynamo"


def import_dynamo() -> None:
    """Import the compiler, as DTensor and optimizers do at their first use. It takes a second."""
    import torch._dynamo  # noqa: F401


def is_dynamo_loaded() -> bool:
    """Whether the compiler was imported, so that something may have been compiled."""
    return DYNAMO in sys.modules


def is_compiled(module: nn.Module) -> bool:
    """Whether the method ``compile()`` of a module was called.

    Private: Module._compiled_call_impl, seen in 2.10 to 2.14. No public replacement.
    """
    return module._compiled_call_impl is not None


def wrap_compiled(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a compiled module calls by ``wrap`` of it. What `wrap` adds runs outside of the graph.

    Private: Module._compiled_call_impl, seen in 2.10 to 2.14. Public replacement: hooks, if they were not compiled with
    their module.
    """
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = wrap(module._compiled_call_impl)


def leave_out_graph_cache() -> None:
    """Have PyTorch make the graphs of forward and backward anew in this process. Compiled code still comes from disk.

    Private: torch._functorch.config.enable_autograd_cache, seen in 2.13. Public replacement: the environment variable
    TORCHINDUCTOR_AUTOGRAD_CACHE=0, before torch is imported.
    """
    from torch._functorch import config

    config.enable_autograd_cache = False


def graph_counts() -> tuple[int, int]:
    """Return how many graphs PyTorch has compiled in this process, and how many operators they have.

    Private: torch._dynamo.utils.counters, seen in 2.10 to 2.14. No public replacement.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]
