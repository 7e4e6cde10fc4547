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

from collections.abc import Sequence

import torch

from mmm.errors import LayoutError
from mmm.layout import Layout, Techniques
from mmm.runtime.device import Precision
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.ranks import Rank

STATE = {"adamw": 2, "lamb": 2, "muon": 1, "lars": 1, "sgd": 0}  # elements a parameter; of muon, at least


def least_elements(parameters: int, layout: Layout, technique: str, state: int) -> int:
    """Elements of parameters, gradients and optimizer state together that a rank has, at least.

    Args:
        parameters: of its pipeline stages, unsharded. technique: of `Techniques.data_parallel`.
        state: elements that the optimizer has for a parameter.
    """
    replicas = layout.dp * layout.cp
    copies = {  # of each parameter
        "ddp": 2 + state,
        "zero1": 2 + state / replicas,
        "zero2": 1 + (1 + state) / replicas,
    }.get(technique, (2 + state) / (layout.dp_shard * layout.cp))
    return int(parameters * copies / layout.tp)


def check_fits(
    parameters: Sequence[int],
    techniques: Techniques,
    state: int,
    layout: Layout,
    rank: Rank,
    device: torch.device,
    precision: Precision,
) -> None:
    """Compare a bound from below with what is there; pass where the system or the device does not tell.

    Args:
        parameters: unsharded, of the ranks of each pp coordinate. state: as of `least_elements`.

    Raises:
        LayoutError: it cannot fit, with the numbers.
    """
    elements = [least_elements(count, layout, techniques.data_parallel, state) for count in parameters]
    if techniques.offload or device.type in ("cpu", "mps"):
        ranks_here = rank.local_world_size or 1
        # Where all ranks are here, so are all stages; else there may be those of the smallest alone.
        average = sum(elements) / len(elements) if ranks_here == layout.ranks else min(elements)
        needed = average * ranks_here
        available = host_memory()
        where = "this host"
    else:
        needed = elements[layout.coordinates(rank.rank)["pp"] % len(elements)]
        available = device_memory(device)
        where = str(device)
    needed *= precision.storage.itemsize
    if available is not None and needed > available:
        raise LayoutError(
            f"the model has {sum(parameters):,} parameters: the ranks on {where} would hold at least "
            f"{needed / 1e9:,.1f} GB of parameters, gradients and optimizer state, and {available / 1e9:,.1f} GB are "
            f"left: use a smaller model, more devices or hosts, or fsdp, which shards it over all ranks"
        )
