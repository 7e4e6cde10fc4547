"""How many elements of a model each rank will have at least, by arithmetic, and whether they fit into its memory.

::

    P parameters, k elements of state for each        parameters   gradients   optimizer state
      ddp                                              P            P           k P
      zero1                                            P            P           k P / (dp · cp)
      zero2                                            P            each of them / (dp · cp)
      fsdp, zero3, hsdp                                each / (dp_shard · cp)

P counts the parameters of a pipeline rank's stages, divided by tp. This is a lower bound: parameters that tp
replicates, padding where ranks do not divide a tensor, activations and buffers come on top.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmm.errors import LayoutError
from mmm.layout import Layout, Techniques
from mmm.runtime.device import Precision
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.ranks import Rank

# Elements of state for each parameter. Muon has at least that many.
STATE = {"adamw": 2, "lamb": 2, "muon": 1, "lars": 1, "sgd": 0}


def least_elements(
    parameters: int,
    layout: Layout,
    technique: str,
    state: int,
) -> int:
    """The least number of elements of parameters, gradients and optimizer state together that a rank has.

    Args:
        parameters: elements of its pipeline stages, unsharded.
        technique: the data-parallel technique (`Techniques.data_parallel`).
        state: elements that the optimizer has for each parameter.
    """
    replicas = layout.dp * layout.cp
    # Elements for each parameter of the rank's stages: parameter + gradient + optimizer state.
    if technique == "ddp":
        elements: float = 2 + state
    elif technique == "zero1":
        elements = 2 + state / replicas
    elif technique == "zero2":
        elements = 1 + (1 + state) / replicas
    else:
        elements = (2 + state) / (layout.dp_shard * layout.cp)
    return int(parameters * elements / layout.tp)


def check_fits(
    parameters: Sequence[int],
    techniques: Techniques,
    state: int,
    layout: Layout,
    rank: Rank,
    device: torch.device,
    precision: Precision,
) -> None:
    """Compare the least memory that a model needs with the memory that is left. Accepts the model where the system or
    the device does not tell.

    Args:
        parameters: unsharded elements at each pp coordinate.
        state: elements that the optimizer has for each parameter.

    Raises:
        LayoutError: the model cannot fit; gives the numbers.
    """
    elements = [least_elements(count, layout, techniques.data_parallel, state) for count in parameters]
    if techniques.offload or device.type in ("cpu", "mps"):
        # The ranks of a host share its memory.
        ranks_here = rank.local_world_size or 1
        if ranks_here == layout.ranks:
            # All ranks are on this host, and so are all stages.
            elements_per_rank = sum(elements) / len(elements)
        else:
            # The ranks on this host may have only the smallest stages.
            elements_per_rank = min(elements)
        needed = elements_per_rank * ranks_here
        available = host_memory()
        place = "this host"
    else:
        needed = elements[layout.coordinates(rank.rank)["pp"] % len(elements)]
        available = device_memory(device)
        place = str(device)
    needed *= precision.storage.itemsize
    if available is not None and needed > available:
        raise LayoutError(
            f"the model has {sum(parameters):,} parameters: the ranks on {place} would hold at least "
            f"{needed / 1e9:,.1f} GB of parameters, gradients and optimizer state, and {available / 1e9:,.1f} GB are "
            f"left: use a smaller model, more devices or hosts, or fsdp, which shards it over all ranks"
        )
