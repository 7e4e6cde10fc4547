"""What a rank sends in a step, by axis, inside a host and between hosts.

The formulas are those of the model's folder (`mmm.models.costs`), which `mmm.traffic.formulas` asks for a run's layout.
"""

from __future__ import annotations

from mmm.models.costs import Held, Setting
from mmm.parallel.collective_bytes import factor, sharded_bytes
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import Group
from mmm_lab.planner.trial import PlannedStage, Trial


def sent_bytes(memory: MemoryModel, stage: PlannedStage, trial: Trial) -> dict[str, float]:
    """Bytes that a rank of a stage sends in a step, by axis; axes on which it sends nothing are left out."""
    spec, layout = memory.spec, trial.layout
    costs = spec.definition.costs
    roles = {spec.kinds[kind].role: count for kind, count in stage.kinds}
    held = Held(roles.get("layer", 0), first="embedding" in roles, last="head" in roles)
    setting = Setting(
        layout=layout,
        ulysses=trial.ulysses,
        batch=trial.local_batch,
        microbatches=trial.microbatches,
        sequence=spec.tokens,
        compute=memory.compute,
        residual=memory.storage if trial.unsharded else memory.compute,
    )
    found = _data_parallel(memory, stage, trial)
    for axis, sent in costs.sent(spec.config, setting, held).items():
        found[axis] = found.get(axis, 0.0) + sent
    if layout.pp > 1:
        faced = 2 * stage.own - (stage.number in (0, layout.pp - 1))
        if trial.techniques.schedule in ("ZBVZeroBubble", "DualPipeV"):
            # The first and the last stage are on one rank, or two neighbours are.
            faced = 2 if stage.number in (0, layout.pp - 1) else 4
        found["pp"] = faced * costs.boundary(spec.config, setting) + 8 * factor("all_reduce", layout.pp)
    return {axis: sent for axis, sent in found.items() if sent}


def _data_parallel(memory: MemoryModel, stage: PlannedStage, trial: Trial) -> dict[str, float]:
    storage, spec, layout = memory.storage, memory.spec, trial.layout
    sizes = memory.of(stage, trial)
    last = sizes.padded if spec.tied and len(stage.kinds) == 1 else sizes.last
    again = {"auto": sizes.padded - last, "always": sizes.padded, "never": 0}[trial.techniques.reshard_after_forward]
    gathered = sizes.padded if layout.pp > 1 else trial.microbatches * (sizes.padded + again)
    local, padded = storage * sizes.local, storage * sizes.padded
    shard = storage * sizes.sharded
    return sharded_bytes(trial.techniques.data_parallel, layout, local, padded, memory.compute * gathered, shard)


def between_hosts(axis: str, sent: float, group: Group) -> float:
    """Of the bytes that a rank sends on an axis those that leave its host, on average over the group."""
    if not group.crosses:
        return 0.0
    if axis == "ep":  # everybody sends to everybody
        return sent * (group.size - group.local) / max(group.size - 1, 1)
    return sent / group.local  # of a ring's ranks on a host one sends to the next host
