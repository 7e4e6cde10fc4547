"""An exponential moving average of a model's parameters, on every layout: each rank averages its own shards.

::

    ema = EMA(model, 0.999)
    …
    optimizer.step()
    ema.update()
    …
    with ema.averaged():  # the model has the averaged weights
        evaluate(…)
        save_model(run, model)

Averaging ``model.parameters()`` by hand would be wrong under FSDP while a unit is gathered, and where it writes through
``.data`` under zero1 and zero2, whose shards are then not gathered. PyTorch's own
``torch.optim.swa_utils.AveragedModel`` copies the module, which FSDP refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.nn.draw import canonical_name
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.zero import Zero
from mmm.parallel.local import to_local

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel


class EMA:
    """average ← decay · average + (1 - decay) · parameter, at each `update`. It begins as the parameters are.

    The averages have the dtype, the sharding and the device of what an optimizer updates. Buffers are not averaged.
    """

    def __init__(self, model: nn.Module | ParallelModel, decay: float = 0.999) -> None:
        """
        Args:
            model: as `build_model` or `apply` and `materialize` return it, or a `ParallelModel`.
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"decay {decay} of an EMA: it must be at least 0, and below 1")
        self.decay = decay
        self._modules = [model] if isinstance(model, nn.Module) else list(model.modules.values())
        self._reshard()
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = {canonical_name(name): parameter for name, parameter in named.items()}
        self._averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _reshard(self) -> None:
        for module in self._modules:
            reshard(module)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The local tensors of each average and its parameter."""
        for name, parameter in self._parameters.items():
            yield to_local(self._averages[name]), to_local(parameter.detach())

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizer."""
        for average, parameter in self._pairs():
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; do not train it there. A collective for zero1 and zero2."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._reshard()  # what is gathered has other weights
        for average, parameter in self._pairs():
            own = parameter.clone()
            parameter.copy_(average)
            average.copy_(own)
        for module in self._modules:
            if isinstance(module, Zero):
                module.gather()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the parameters' names, sharded as those are: for ``torch.distributed.checkpoint``."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take averages of `state_dict`, of the same layout.

        Raises:
            ConfigError: they are of other parameters.
        """
        if wrong := sorted(state.keys() ^ self._averages.keys()):
            raise ConfigError(f"the averages do not have the parameters of the model: {', '.join(wrong[:5])}")
        for name, average in self._averages.items():
            to_local(average).copy_(to_local(state[name]))
