"""Private names of torch.compile."""

from __future__ import annotations

import sys

from torch import nn

# Private: torch._dynamo, seen in 2.10 to 2.14; instead: torch.compiler, had it these functions.
DYNAMO = "torch._dynamo"


def import_dynamo() -> None:
    """Import what compiles, as DTensor and optimizers do at their first use. It takes a second."""
    import torch._dynamo  # noqa: F401


def is_dynamo_loaded() -> bool:
    """Whether anything can have been compiled so far."""
    return DYNAMO in sys.modules


def is_compiled(module: nn.Module) -> bool:
    """Whether ``compile()`` of a module was called.

    Private: Module._compiled_call_impl, seen in 2.10 to 2.14; instead: nothing."""
    return module._compiled_call_impl is not None


def graph_counts() -> tuple[int, int]:
    """Graphs that PyTorch has made in this process, and operators in them.

    Private: torch._dynamo.utils.counters, seen in 2.10 to 2.14; instead: nothing."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]
