"""A layout that was asked for by its sizes: what is not named is as usual; and why none has what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from mmm.errors import UserError
from mmm.layout import AXES, Layout, Techniques, check_data_parallel
from mmm.parallel.cp.styles import host_ulysses
from mmm.parallel.partition import partition_model
from mmm.parallel.pp.schedules import SCHEDULES

if TYPE_CHECKING:
    from mmm_lab.planner.search import Search

# The axes and techniques of a trainer that is given none. Chunks of the loss follow from the batch, as there.
USUAL: dict[str, object] = {
    **{axis: 1 for axis in (*AXES, "ep") if axis != "dp_shard"},
    "data_parallel": "fsdp",
    "reshard_after_forward": "auto",
    "checkpointing": "none",
    "cp_style": "ring",
    "offload": False,
}


def exactly(fixed: Mapping[str, object]) -> dict[str, Any]:
    """What was asked for, and of all that was not what is usual; one layout alone has it."""
    chosen: dict[str, Any] = {**USUAL, "schedule": "1F1B", **fixed}
    pp, schedule = chosen["pp"], SCHEDULES.get(chosen["schedule"])
    if pp > 1 and schedule is not None:
        return {"stages_per_rank": schedule.least, "microbatches": schedule.microbatches(pp)[0], **chosen}
    return {"microbatches": 1, **chosen}


def why_not(search: Search) -> str:
    """The first rule that what was asked for breaks, whatever else a layout has: what a trainer would say. "" where
    only the search can say."""
    fixed, spec = search.fixed, search.spec
    sizes: dict[str, Any] = {axis: fixed[axis] for axis in (*AXES, "ep") if axis in fixed}
    names = [field.name for field in fields(Techniques) if field.name in fixed]
    techniques = Techniques(**{name: fixed[name] for name in names})  # type: ignore[arg-type]
    try:
        layout = Layout(**sizes).fit(search.machine.ranks)
        if not fixed.keys() >= USUAL.keys():
            if techniques.data_parallel != "hsdp" or "dp_replicate" in fixed:
                check_data_parallel(techniques.data_parallel, layout)
            return ""
        if layout.pp > len(spec.sequence) or search.global_batch % layout.dp:
            return ""
        if techniques.cp_style == "usp":
            heads, per_host = getattr(spec.config, "n_heads", 0), search.machine.ranks_per_host
            techniques = replace(techniques, ulysses=host_ulysses(layout.cp, layout.tp, heads, per_host))
        model, sample = spec.definition.on_meta(spec.config, search.global_batch // layout.dp, spec.seq_length)
        partition_model(model, spec.plan, layout, techniques, sample)
    except UserError as error:
        return str(error)
    shape = f"dp_replicate {layout.dp_replicate}, dp_shard {layout.dp_shard}, cp {layout.cp}"
    return (
        f"{techniques.data_parallel} with {shape}, cp_style {techniques.cp_style}, microbatches "
        f"{techniques.microbatches}: a trainer may take it, and the search does not look at it: it shards over several "
        "ranks, has hsdp for replicas, usp for hosts, and micro-batches of one size"
    )
