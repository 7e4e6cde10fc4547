"""How much of a model each rank will have at least, by arithmetic alone; and whether that fits into the memory here.

::

    of P parameters, k elements of state for each     parameters   gradients   optimizer state
      ddp                                              P            P           k P
      zero1                                            P            P           k P / (dp · cp)
      zero2                                            P            each of them / (dp · cp)
      fsdp, zero3, hsdp                                each / (dp_shard · cp)

P: of the stages of a pipeline rank, over tp. A lower bound: parameters that tp replicates, padding where ranks do not
divide a tensor, activations and buffers come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmm.errors import LayoutError
from mmm.layout import UNSHARDED, Layout
from mmm.runtime.device import Precision
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.ranks import Rank

STATE = {"adamw": 2, "lamb": 2, "muon": 1, "lars": 1, "sgd": 0}  # of muon, at least


@dataclass(frozen=True)
class Footprint:
    """What the ranks of a run have in memory.

    Attributes:
        parameters: unsharded, of the ranks of each pp coordinate.
        data_parallel, offload: of `mmm.parallel.Techniques`. state: elements that the optimizer has for a parameter.
    """

    parameters: tuple[int, ...]
    data_parallel: str = "fsdp"
    state: int = 2
    offload: bool = False

    def elements(self, layout: Layout) -> list[int]:
        """Of parameters, gradients and optimizer state together, on a rank of each pp coordinate, at least."""
        parameters, gradients, state = 1.0, 1.0, float(self.state)
        if self.data_parallel in UNSHARDED:
            state /= layout.dp * layout.cp if self.data_parallel != "ddp" else 1
            gradients /= layout.dp * layout.cp if self.data_parallel == "zero2" else 1
        else:
            parameters, gradients, state = (n / (layout.dp_shard * layout.cp) for n in (parameters, gradients, state))
        return [int(count * (parameters + gradients + state) / layout.tp) for count in self.parameters]


def check_fits(holds: Footprint, layout: Layout, rank: Rank, device: torch.device, precision: Precision) -> None:
    """Compare a bound from below with what is there; pass where the system or the device does not tell.

    Raises:
        LayoutError: it cannot fit, with the numbers.
    """
    width = torch.empty(0, dtype=precision.storage).element_size()
    bytes_by_pp_rank = [width * count for count in holds.elements(layout)]
    on_host = holds.offload or device.type in ("cpu", "mps")
    available = host_memory() if on_host else device_memory(device)
    if available is None:
        return
    everywhere = sum(bytes_by_pp_rank) * layout.ranks // len(bytes_by_pp_rank)
    if not on_host:
        pp_rank = layout.coordinates(rank.rank)["pp"]
        needed, who, where = bytes_by_pp_rank[pp_rank % len(bytes_by_pp_rank)], "a rank", f"{device}"
    elif (local_ranks := rank.local_world_size or 1) == layout.ranks:  # all of them are here
        needed, who, where = everywhere, _ranks(layout.ranks), "this host"
    else:
        needed, who, where = min(bytes_by_pp_rank) * local_ranks, _ranks(local_ranks), "this host"
    if needed <= available:
        return
    parts = ["parameters", "gradients"] + ["optimizer state"] * (holds.state > 0)
    more = _more(holds, "hosts" if on_host else "ranks", -(-everywhere // max(available, 1)))
    raise LayoutError(
        f"the model has {sum(holds.parameters):,} parameters: {who} would hold at least {needed / 1e9:,.1f} GB of "
        f"{', '.join(parts)}, and {where} has {available / 1e9:,.1f} GB left: use a smaller model, {more}"
    )


def _more(holds: Footprint, of_what: str, least: int) -> str:
    """What else would help."""
    if holds.data_parallel in UNSHARDED:
        return f"or a technique that shards it over the ranks: with {holds.data_parallel} each has all parameters"
    return f"or at least {least:,} {of_what} such as this to shard it over"


def _ranks(count: int) -> str:
    return "1 rank here" if count == 1 else f"{count} ranks here"
