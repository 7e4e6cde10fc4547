"""Sees every operator on plain tensors, where PyTorch dispatches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from mmm.torch_private.operators import TorchDispatchMode


class PlainTensors(TorchDispatchMode, ABC):
    """A dispatch mode that `run` handles operators in. While it handles one, it is off."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then dispatches operators on plain tensors, which come here.
            return NotImplemented
        return self.run(func, args, dict(kwargs or {}))

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operator, and return its result: mostly `func(*args, **kwargs)`."""
