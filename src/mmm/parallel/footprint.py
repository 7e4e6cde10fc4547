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
    elements = holds.elements(layout)
    on_host = holds.offload or device.type in ("cpu", "mps")
    if on_host:
        ranks_here = rank.local_world_size or 1
        # Where all ranks are here, so are all stages; else there may be those of the smallest alone.
        average = sum(elements) / len(elements) if ranks_here == layout.ranks else min(elements)
        needed, available, where = average * ranks_here, host_memory(), "this host"
    else:
        coordinate = layout.coordinates(rank.rank)["pp"] % len(elements)
        needed, available, where = elements[coordinate], device_memory(device), f"{device}"
    needed *= precision.storage.itemsize
    if available is not None and needed > available:
        raise LayoutError(
            f"the model has {sum(holds.parameters):,} parameters: the ranks on {where} would hold at least "
            f"{needed / 1e9:,.1f} GB of parameters, gradients and optimizer state, and {available / 1e9:,.1f} GB are "
            f"left: use a smaller model, more devices or hosts, or fsdp, which shards it over all ranks"
        )
