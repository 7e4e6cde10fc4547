"""Bytes that a rank sends in a step, by axis, inside a host and between hosts.

The formulas are those of the model's folder (`mmm.models.costs`). `mmm.traffic.formulas` asks the same ones for a run.
"""

from __future__ import annotations

from mmm.models.costs import Held, Setting
from mmm.parallel.collective_bytes import sharded_bytes
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import Group
from mmm_lab.planner.trial import PlannedStage, Trial


def sent_bytes(memory: MemoryModel, stage: PlannedStage, trial: Trial) -> dict[str, float]:
    """Bytes that a rank of a stage sends in a step, by axis. Axes on which it sends nothing are left out."""
    spec = memory.spec
    layout = trial.layout
    roles = {spec.kinds[kind].role for kind, _ in stage.kinds}
    held = Held(stage.layers, first="embedding" in roles, last="head" in roles, boundaries=stage.boundaries)
    setting = Setting(
        layout=layout,
        ulysses=trial.ulysses,
        batch=trial.local_batch,
        microbatches=trial.microbatches,
        sequence=spec.tokens,
        compute=memory.compute,
        residual=memory.storage if trial.unsharded else memory.compute,
    )
    by_axis = _data_parallel(memory, stage, trial)
    for axis, sent in spec.definition.costs.sent(spec.config, setting, held).items():
        # FSDP gathers and reduces over cp as well.
        by_axis[axis] = by_axis.get(axis, 0.0) + sent
    return {axis: sent for axis, sent in by_axis.items() if sent}


def _data_parallel(memory: MemoryModel, stage: PlannedStage, trial: Trial) -> dict[str, float]:
    """Bytes of gathering parameters and reducing gradients, by axis."""
    layout = trial.layout
    sizes = memory.of(stage, trial)
    # FSDP keeps the last unit gathered between forward and backward.
    last = sizes.last
    if memory.spec.tied and len(stage.kinds) == 1:
        last = sizes.padded
    gathered_again = {
        "auto": sizes.padded - last,
        "always": sizes.padded,
        "never": 0,
    }
    gathered = sizes.padded
    if layout.pp == 1:
        again = gathered_again[trial.techniques.reshard_after_forward]
        gathered = trial.microbatches * (sizes.padded + again)
    return sharded_bytes(
        trial.techniques.data_parallel,
        layout,
        memory.storage * sizes.local,
        memory.storage * sizes.padded,
        memory.compute * gathered,
        memory.storage * sizes.sharded,
    )


def between_hosts(axis: str, sent: float, group: Group) -> float:
    """The bytes that leave the host, of those that a rank sends on an axis. An average over the group."""
    if not group.crosses:
        return 0.0
    if axis == "ep":
        # In an all-to-all each rank sends to every other.
        return sent * (group.size - group.local) / max(group.size - 1, 1)
    # In a ring one of the ranks of a host sends to the next host.
    return sent / group.local
