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

Averaging ``model.parameters()`` by hand would be wrong under FSDP while a unit is gathered; under zero1 and zero2 it
would be wrong if it writes through ``.data``, because the shards are then not gathered. PyTorch's own
``torch.optim.swa_utils.AveragedModel`` copies the module, which FSDP refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.nn.init import canonical_name
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.dp.zero import Zero
from mmm.parallel.local import to_local

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel


class EMA:
    """At each `update`: average ← decay · average + (1 - decay) · parameter. Averages begin as the parameters are.

    The averages have the dtype, the sharding and the device of what an optimizer updates. Buffers are not averaged.
    """

    def __init__(self, model: nn.Module | ParallelModel, decay: float = 0.999) -> None:
        """
        Args:
            model: a model as `build_model`, or `parallelize` and `materialize`, return it; or a `ParallelModel`.
            decay: at least 0, below 1.
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"decay {decay} of an EMA: it must be at least 0, and below 1")
        self.decay = decay
        self._modules = [model] if isinstance(model, nn.Module) else list(model.modules.values())
        # While a unit of FSDP is gathered, its module has other parameters than the optimizer.
        self._reshard()
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._parameters[canonical_name(name)] = parameter
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
        """Average the parameters in. Call it after a step of the optimizer."""
        for average, parameter in self._pairs():
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put in the averaged weights in this block. Do not train it there. A collective for zero1 and zero2."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # What is gathered has the weights from before the exchange.
        self._reshard()
        for average, parameter in self._pairs():
            own = parameter.clone()
            parameter.copy_(average)
            average.copy_(own)
        # Each rank has exchanged only its own rows: an all-gather over the data-parallel ranks brings the others.
        for module in self._modules:
            if isinstance(module, Zero):
                module.gather()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the parameters' names, sharded like these: for ``torch.distributed.checkpoint``."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over averages from `state_dict`, made on the same layout.

        Raises:
            ConfigError: they belong to other parameters.
        """
        differing = sorted(state.keys() ^ self._averages.keys())
        if differing:
            raise ConfigError(f"the averages do not have the parameters of the model: {', '.join(differing[:5])}")
        for name, average in self._averages.items():
            to_local(average).copy_(to_local(state[name]))
