"""What a rank sends in a step, by axis, inside a host and between hosts: `mmm.traffic.formulas` by arithmetic.

The formulas are those of that module, which reads them from a model's modules; here they are computed from a
`ModelSpec`, and for ``ep`` what the tokens take that travel to their experts. `tests/mmm_lab/planner/test_traffic.py`
compares the two.
"""

from __future__ import annotations

from mmm.models.definition import of_config
from mmm.models.gpt.model import GPTConfig
from mmm.models.vit.model import ViTConfig
from mmm.traffic.collective_bytes import context_bytes, factor, heads_over_cp, language_bytes, sharded_bytes
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.network import Group
from mmm_lab.planner.trial import PlannedStage, Trial


def sent_bytes(memory: MemoryModel, stage: PlannedStage, trial: Trial) -> dict[str, float]:
    """Bytes that a rank of a stage sends in a step, by axis; axes on which it sends nothing are left out."""
    spec, config, layout = memory.spec, memory.spec.config, trial.layout
    roles = {spec.kinds[kind].role: count for kind, count in stage.kinds}
    layers, head, embedding = roles.get("layer", 0), "head" in roles, "embedding" in roles
    found = _data_parallel(memory, stage, trial)
    tokens, c = trial.local_batch * spec.tokens / layout.cp, memory.compute
    residual = memory.storage if trial.unsharded else c
    if of_config(config).language:
        if layout.tp > 1:
            ends, pairs = (embedding, head), 1 if config.n_experts else 2
            biases = isinstance(config, GPTConfig) and config.bias
            found["tp"] = language_bytes(layout.tp, tokens, config.dim, layers, ends, residual, c, pairs, biases)
            if isinstance(config, GPTConfig) and embedding:  # positions, of one sample a micro-batch
                positions = trial.microbatches * spec.seq_length / layout.cp
                found["tp"] += 2 * factor("all_gather", layout.tp) * positions * config.dim * residual
        if layout.cp > 1:
            ulysses = trial.ulysses
            a_head = tokens * config.head_dim  # elements in one head of this rank's tokens
            heads = config.n_heads // layout.tp
            kv_heads = heads_over_cp(config.n_kv_heads, layout.tp, ulysses)
            by_axis = context_bytes(layout.cp, ulysses, heads * a_head, 2 * kv_heads * a_head, c, layers)
            for axis, sent in by_axis.items():
                found[axis] = found.get(axis, 0.0) + sent
        if layout.ep > 1:
            sent = tokens / layout.tp * config.top_k * config.dim * c
            found["ep"] = 4 * layers * factor("all_to_all", layout.ep) * sent
    elif isinstance(config, ViTConfig) and layout.tp > 1:
        found["tp"] = 4 * layers * factor("all_gather", layout.tp) * tokens * config.dim * (residual + c)
    if layout.pp > 1:
        faced = 2 * stage.own - (stage.number in (0, layout.pp - 1))
        if trial.techniques.schedule in ("ZBVZeroBubble", "DualPipeV"):
            # The first and the last stage are on one rank, or two neighbours are.
            faced = 2 if stage.number in (0, layout.pp - 1) else 4
        boundary = memory.kept(layout.tp, trial.unsharded).boundary
        found["pp"] = faced * boundary * tokens + 8 * factor("all_reduce", layout.pp)
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
