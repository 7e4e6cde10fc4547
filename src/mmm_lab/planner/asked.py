"""Completes a layout that was asked for by a few sizes, and says why no layout has what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mmm.errors import UserError
from mmm.layout import AXES, SEQUENCE_STYLES, Layout, Techniques, check_data_parallel
from mmm.parallel.cp.styles import check_cp_style, host_ulysses
from mmm.parallel.pp.schedules import SCHEDULES, check_pipeline

if TYPE_CHECKING:
    from mmm_lab.planner.search import Search

# Axes and techniques of a trainer without flags. The chunks of the loss follow from the batch, as in the trainer.
DEFAULTS: dict[str, object] = {
    **{axis: 1 for axis in (*AXES, "ep") if axis != "dp_shard"},
    "data_parallel": "fsdp",
    "reshard_after_forward": "auto",
    "checkpointing": "none",
    "cp_style": "ring",
    "offload": False,
}


def exactly(fixed: Mapping[str, object]) -> dict[str, Any]:
    """What was asked for, with defaults for all that was not. Exactly one layout has these."""
    chosen: dict[str, Any] = {**DEFAULTS, "schedule": "1F1B", **fixed}
    pp = chosen["pp"]
    schedule = SCHEDULES.get(chosen["schedule"])
    if pp > 1 and schedule is not None:
        # The fewest that the schedule can do with.
        return {
            "stages_per_rank": schedule.min_stages,
            "microbatches": schedule.microbatches(pp)[0],
            **chosen,
        }
    return {"microbatches": 1, **chosen}


def why_not(search: Search) -> str:
    """The first rule that every layout with what was asked for breaks. Empty if only the search can say."""
    fixed = search.fixed
    sizes: dict[str, Any] = {axis: fixed[axis] for axis in (*AXES, "ep") if axis in fixed}
    techniques = Techniques(**{field.name: fixed[field.name] for field in fields(Techniques) if field.name in fixed})
    try:
        layout = Layout(**sizes).fit(search.machine.ranks)
        if techniques.data_parallel != "hsdp" or "dp_replicate" in fixed:
            check_data_parallel(techniques.data_parallel, layout)
        if fixed.keys() >= DEFAULTS.keys():
            return _why_not_this(search, layout, techniques)
    except UserError as error:
        return str(error)
    return ""


def _why_not_this(search: Search, layout: Layout, techniques: Techniques) -> str:
    """The first rule that one layout with its techniques breaks. Raises UserError with other rules that it breaks."""
    check_cp_style(techniques.cp_style, SEQUENCE_STYLES)
    technique = techniques.data_parallel
    broken = search.broken(
        layout.tp,
        layout.cp,
        layout.ep,
        techniques.ulysses_size(layout.cp),
    )
    if broken:
        return broken
    heads = getattr(search.spec.config, "n_heads", 0)
    # usp needs a number of neighbours that is neither one rank nor all of cp.
    sharing = host_ulysses(layout.cp, layout.tp, heads, search.machine.ranks_per_host)
    if techniques.cp_style == "usp" and layout.cp > 1 and sharing in (1, layout.cp):
        return f"cp_style usp: of cp {layout.cp} all or none can share heads on a host: use ulysses or ring"
    if layout.pp > len(search.spec.sequence) or search.global_batch % layout.dp:
        # The search says so itself.
        return ""
    if technique in ("zero1", "zero2", "hsdp") and layout.dp_shard * layout.cp == 1:
        return f"{technique} shards over dp_shard and cp, and the layout {layout} has one rank there: use fsdp or ddp"
    # FSDP on replicas is hsdp, which has its own name.
    if technique == "fsdp" and layout.dp_replicate > 1:
        return f"fsdp has no replicas, and the layout has dp_replicate {layout.dp_replicate}: use hsdp"
    local = search.global_batch // layout.dp
    count = techniques.microbatches or 1
    if layout.pp > 1:
        check_pipeline(layout, techniques, local, len(search.spec.sequence))
    elif count < 1 or local % count:
        return f"microbatches {count}: a batch of {local} a data-parallel coordinate cannot be split into as many"
    return ""
