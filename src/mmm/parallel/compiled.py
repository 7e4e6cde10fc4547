"""What ``torch.compile`` has really compiled: it falls back to plain PyTorch without a word where it cannot."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mmm.runtime.log import get_logger


class CompileReport:
    """Counts from when it is made, before the compiled modules first run.

    Args:
        modules: some with compiled modules in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inside = [module for whole in modules for module in whole.modules()]
        self.modules = sum(module._compiled_call_impl is not None for module in inside)
        self._before = _counters()

    def made(self) -> tuple[int, int]:
        """Graphs that PyTorch has made since, one for equal modules, and operators in them."""
        graphs, operators = (now - before for now, before in zip(_counters(), self._before, strict=True))
        return graphs, operators

    def say(self) -> None:
        """Log it, once the modules have run; a warning where nothing was compiled that was to be."""
        graphs, operators = self.made()
        if graphs:
            get_logger().info(
                "compile: %d modules became %d graph%s of %d operators",
                self.modules,
                graphs,
                "s" * (graphs > 1),
                operators,
            )
        elif self.modules:
            get_logger().warning(
                "compile: PyTorch has compiled none of the %d modules, and runs them as they are; "
                "TORCH_LOGS=graph_breaks says why",
                self.modules,
            )


def _counters() -> tuple[int, int]:
    from torch._dynamo.utils import counters  # slow to import, and needed by who compiles alone

    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]
