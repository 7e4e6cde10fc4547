"""Whether a model goes into the memory that is there: before anything is allocated, or written."""

from __future__ import annotations

import torch
from torch import nn

from mmm.analysis.footprint import STATE, Footprint, stage_parameters
from mmm.errors import LayoutError
from mmm.models.weights import parameter_count
from mmm.parallel.data.apply import UNSHARDED
from mmm.parallel.mesh import Layout
from mmm.parallel.partition import Partition
from mmm.parallel.techniques import Techniques
from mmm.runtime.device import Precision
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.ranks import Rank


def footprint_of(
    model: nn.Module,
    optimizer: str,
    techniques: Techniques | None = None,
    partition: Partition | None = None,
    pp: int = 1,
) -> Footprint:
    """What the ranks will hold of `model`.

    Args:
        model: on the meta device. optimizer: adamw or sgd. techniques: None for FSDP.
        partition: of a pipeline over `pp` ranks.
    """
    techniques = techniques or Techniques()
    counts: tuple[int, ...] = (parameter_count(model),)
    if partition is not None and partition.stages:
        counts = stage_parameters(model, partition.parts, partition.stages, pp, techniques.schedule)
    return Footprint(counts, techniques.data_parallel, STATE[optimizer], techniques.offload)


def check_fits(holds: Footprint, layout: Layout, rank: Rank, device: torch.device, precision: Precision) -> None:
    """Compare a bound from below with what is there; pass where the system or the device does not tell.

    Raises:
        LayoutError: it cannot fit, with the numbers.
    """
    width = torch.empty(0, dtype=precision.storage).element_size()
    each = [width * count for count in holds.elements(layout)]
    on_host = holds.offload or device.type in ("cpu", "mps")
    there = host_memory() if on_host else device_memory(device)
    if there is None:
        return
    everywhere = sum(each) * layout.ranks // len(each)
    if not on_host:
        at = layout.coordinates(rank.rank)["pp"]
        needed, who, where = each[at % len(each)], "a rank", f"{device}"
    elif (here := rank.local_world_size or 1) == layout.ranks:  # all of them are here
        needed, who, where = everywhere, _ranks(layout.ranks), "this host"
    else:
        needed, who, where = min(each) * here, _ranks(here), "this host"
    if needed <= there:
        return
    parts = ["parameters", "gradients"] + ["optimizer state"] * (holds.state > 0)
    more = _more(holds, "hosts" if on_host else "ranks", -(-everywhere // max(there, 1)))
    raise LayoutError(
        f"the model has {sum(holds.parameters):,} parameters: {who} would hold at least {needed / 1e9:,.1f} GB of "
        f"{', '.join(parts)}, and {where} has {there / 1e9:,.1f} GB left: use a smaller model, {more}"
    )


def _more(holds: Footprint, of_what: str, least: int) -> str:
    """What else would help."""
    if holds.data_parallel in UNSHARDED:
        return f"or one that is cut over the ranks: with {holds.data_parallel} each has all parameters"
    return f"or at least {least:,} {of_what} such as this to cut it over"


def _ranks(count: int) -> str:
    return "1 rank here" if count == 1 else f"{count} ranks here"
