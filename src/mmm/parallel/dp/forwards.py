"""Whether all ranks call the same FSDP units, in one order, and use the same parameters, so that collectives pair up.

Each rank hashes what it calls. The hash travels with a row of the run, which is gathered anyway, and ranks that differ
end the run by name::

    rank 0 calls   embed  left   head        hash 0x51c2a9
    rank 1 calls   embed  right  head        hash 0x0e77b4     left (not by rank 1), right (not by rank 0)

Where the units' sizes or numbers differ, a collective may fail or wait before the row comes.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmm.layout import Layout
from mmm.models.draw import canonical_name

HASH_BITS = 24  # a float32 has such integers exactly
NAMED = 4  # units that a message names
UNUSED = "no gradient of "  # a parameter


class Forwards:
    """What this rank has called since the last row.

    Attributes:
        hash: of all calls, in their order.
        calls: how often each unit was called, and each parameter had no gradient when an optimizer made its step.
    """

    def __init__(self) -> None:
        self.hash = 0
        self.calls: Counter[str] = Counter()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._looks_at_optimizers = False

    def watch(self, model: nn.Module, units: Mapping[str, Any]) -> None:
        """Note what is called of a model that `fully_shard` has sharded.

        Args:
            units: the modules of its FSDP units, by name.
        """
        if not self._looks_at_optimizers:
            register_optimizer_step_pre_hook(self._note_unused)
            self._looks_at_optimizers = True
        self._models.add(model)
        for name, module in units.items():
            module.register_forward_pre_hook(self._noting(canonical_name(name) or "the model"))

    def _noting(self, unit: str) -> Callable[..., None]:
        return lambda *_: self.note(unit)

    def note(self, what: str) -> None:
        self.hash = zlib.crc32(what.encode(), self.hash)
        self.calls[what] += 1

    def _note_unused(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        unused = {id(parameter) for parameter in parameters if parameter.requires_grad and parameter.grad is None}
        if not unused:
            return
        names = [
            canonical_name(name)
            for model in self._models
            for name, parameter in model.named_parameters()
            if id(parameter) in unused
        ]
        for name in sorted(names):  # models are in no order
            self.note(UNUSED + name)

    def take(self) -> tuple[int, Counter[str]]:
        """The hash and the calls since this was called last."""
        taken = self.hash % 2**HASH_BITS, self.calls
        self.hash = 0
        self.calls = Counter()
        return taken


FORWARDS = Forwards()  # of this process: all models that it trains


def forwards_differ(hashes: Tensor, layout: Layout) -> Tensor:
    """Whether ranks that have the same stage of a pipeline have called other units.

    Args:
        hashes: (ranks,), of `Forwards.take`, by rank.

    Returns:
        (1,), 1.0 or 0.0, on the device of `hashes`.
    """
    by_stage = hashes.view(layout.pp, -1)  # (stages, ranks of a stage)
    return (by_stage != by_stage[:, :1]).any().to(hashes.dtype).view(1)


def difference(calls: Sequence[Counter[str]], layout: Layout) -> str:
    """Which ranks have not called what others have, as a sentence.

    Args:
        calls: of `Forwards.take`, by rank.
    """
    ranks_per_stage = len(calls) // layout.pp
    uneven = []
    for first in range(0, len(calls), ranks_per_stage):
        by_rank = dict(enumerate(calls[first : first + ranks_per_stage], start=first))
        most = Counter[str]()
        for counts in by_rank.values():
            most |= counts
        units_first = sorted(most.items(), key=lambda item: (item[0].startswith(UNUSED), item[0]))
        for what, count in units_first:
            fewer = [str(rank) for rank, counts in by_rank.items() if counts[what] < count]
            if fewer:
                not_by = "not" if all(by_rank[int(rank)][what] == 0 for rank in fewer) else "fewer times"
                uneven.append(f"{what} ({not_by} by rank {', '.join(fewer)})")
    if not uneven:
        uneven.append("the same ones, in another order")
    if len(uneven) > NAMED:
        uneven = [*uneven[:NAMED], f"and {len(uneven) - NAMED} more"]
    return (
        f"ranks have called other FSDP units since the last row: {', '.join(uneven)}. Their collectives did not pair "
        f"up, and what they have computed is wrong: leave what only some samples use out of the plan's fsdp_units and "
        f"give it a gradient on every rank (add 0 times its sum), or use zero1 or zero2"
    )
