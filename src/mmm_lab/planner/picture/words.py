"""The texts of a picture: a layout's name, what its techniques mean, and what each operation is for."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.layout import UNSHARDED, Layout
from mmm_lab.planner.picture.facts import DATA, Facts, Flow

FEW = 64  # bytes: an all-reduce of less sums the loss or a norm
NAMES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "fsdp": "FSDP (ZeRO-3)",
}
HELD = {
    "ddp": "Every rank has the whole model, gradients and optimizer state, and its own samples. In backward the "
    "gradients are summed over the ranks.",
    "zero1": "Every rank has all weights and gradients, and the optimizer state of its own rows alone: it updates "
    "these, and then gathers the rows that the others have updated.",
    "zero2": "Every rank has all weights; of gradients and optimizer state it has its own rows alone. It updates "
    "these, and then gathers the rows that the others have updated.",
    "fsdp": "Every rank has its rows of each weight, of its gradient and of its optimizer state. A layer's weights are "
    "gathered just before it computes, {freed}.",
    "hsdp": "Inside a group of dp_shard every rank has its rows of each weight, as in FSDP; the groups of dp_replicate "
    "have the same rows and other samples, and sum the gradients of these.",
}
AXES = {
    "tp": "Over tp each matrix is sharded by rows or columns: the ranks of a group have the same samples, and send "
    "activations, never weights.",
    "pp": "Over pp the layers are split into stages: activations go to the next stage, their gradients come back.",
    "cp": "Over cp each rank has two pieces of every sequence, which gives all the same work in causal attention.",
    "ep": "Over ep the experts are shared out: each token travels to the experts that it has chosen, and back. "
    "The ranks with the same experts are expert_dp, over which FSDP shards these.",
}
CP = {
    "ring": "In attention the keys and values go round the ring, until each rank has seen those of all.",
    "ulysses": "In attention a rank gets all tokens of some heads in exchange for its tokens of the others.",
    "usp": "In attention neighbours exchange heads for tokens, and keys and values go round a ring of such groups.",
}
SEQUENCE = "Between the matrix products a rank keeps its own tokens alone (sequence parallel): those in the frame."
CP_NAMES = {
    "ring": "ring",
    "ulysses": "Ulysses",
    "usp": "ring of Ulysses groups",
}
# What a flow is for, by kind of axis, operation and part of the step.
MEANINGS = dict(
    line.split(": ", 1)
    for line in """
data all_gather forward: a layer's weights, before it computes; freed after it
data all_gather backward: the same weights again, for the gradients
data all_gather optimizer: the rows of the weights that other ranks have updated
data reduce_scatter backward: gradients: summed, each rank keeps its rows
data all_reduce backward: gradients: summed, every rank has the sum
tp all_gather forward: activations: the tokens of all, before a product
tp reduce_scatter forward: activations: summed after a product, each keeps its tokens
tp all_gather backward: gradients of activations, the other way
tp reduce_scatter backward: gradients of activations, the other way
tp all_reduce forward: the loss: each rank has a part of the vocabulary
tp all_reduce backward: gradients of the norms, which every rank has
tp all_reduce optimizer: gradients of the norms, which every rank has
cp send forward: keys and values, to the next rank of the ring
cp send backward: keys, values and their gradients, round the ring
cp all_to_all forward: attention: all tokens of some heads, and back
cp all_to_all backward: their gradients, the other way
ep all_to_all forward: tokens, to their experts and back
ep all_to_all backward: gradients of tokens, the other way
pp send forward: activations, to the next stage
pp send backward: gradients of activations, to the stage before
pp all_reduce optimizer: the loss, from the last stage to all
""".strip().splitlines()
)
# What tp all-reduces are for without sequence parallelism, when every rank has all activations.
UNSCATTERED = {
    "forward": "activations: summed after a product, every rank has the sum",
    "backward": "gradients of activations, summed",
}


def title(facts: Facts) -> str:
    """The name of a layout, such as ``FSDP × tensor parallel``."""
    layout = facts.layout
    technique = facts.techniques.data_parallel
    if layout.ranks == 1:
        return "One device"
    names = []
    if layout.pp > 1:
        names.append("pipeline")
    # With cp, FSDP shards over its ranks even where dp has one.
    if layout.dp > 1 or (layout.cp > 1 and technique not in UNSHARDED):
        names.append("HSDP" if _hybrid(layout) else NAMES.get(technique, "HSDP"))
    if layout.cp > 1:
        names.append(f"context parallel ({CP_NAMES[facts.techniques.cp_style]})")
    if layout.ep > 1:
        names.append("expert parallel")
    if layout.tp > 1:
        names.append("tensor parallel")
    text = " × ".join(names)
    return text[:1].upper() + text[1:]


def _hybrid(layout: Layout) -> bool:
    """Whether dp both shards and replicates."""
    return layout.dp_replicate > 1 and layout.dp_shard > 1


def sentences(facts: Facts) -> list[str]:
    """What each technique of the layout means."""
    layout = facts.layout
    if layout.ranks == 1:
        return ["One device has everything: weights, gradients, optimizer state and all samples. Nothing travels."]
    texts = []
    if layout.dp > 1 or layout.cp > 1:
        technique = facts.techniques.data_parallel
        if _hybrid(layout):
            technique = "hsdp"
        elif technique in ("zero3", "hsdp"):
            technique = "fsdp"
        freed = "and stay until the step ends"
        if facts.frees_weights:
            freed = "and freed after it"
        texts.append(HELD[technique].format(freed=freed))
    texts += [text for axis, text in AXES.items() if getattr(layout, axis) > 1]
    if layout.cp > 1:
        texts.append(CP[facts.techniques.cp_style])
    if layout.pp > 1:
        texts.append(f"The samples of a step go through the stages in {facts.held(0).microbatches} micro-batches.")
    if facts.between_products(0):
        texts.append(SEQUENCE)
    return texts


def others(layout: Layout, shown: Sequence[int]) -> str:
    """A sentence on the ranks that are not drawn."""
    drawn = f"Ranks {shown[0]} to {shown[-1]} of {layout.ranks:,}."
    return f"{drawn} The others hold the parts of their own coordinates, and send as much."


def meaning(facts: Facts, flow: Flow) -> str:
    """What a flow is for. Empty if it is not known."""
    if flow.axis == "pp" and flow.operation == "send" and facts.loops:
        return "activations, and in backward their gradients, between stages"
    # All axes that gradients are summed over mean the same.
    kind = flow.axis
    if flow.axis in DATA:
        kind = "data"
    if flow.axis.startswith("cp") and flow.operation in ("send", "all_to_all"):
        # Attention. FSDP also gathers and reduces over cp.
        kind = "cp"
    key = f"{kind} {flow.operation} {flow.doing}"
    if key == "data all_gather forward" and not facts.frees_weights:
        return "a layer's weights, before it computes; they stay until the step ends"
    if (kind, flow.operation) == ("tp", "all_reduce") and flow.doing in UNSCATTERED and not facts.between_products(0):
        return UNSCATTERED[flow.doing]
    # Bytes of one call: the loss and norms are single numbers, gradients are not.
    size = flow.sent / flow.calls
    # Every step sums the loss over the ranks, and clipping the norms.
    numbers_only = "a few numbers: the gradients' norm, the loss"
    if flow.operation == "all_reduce" and flow.doing == "optimizer" and size < FEW:
        return numbers_only
    return MEANINGS.get(key, numbers_only if size < 16 * FEW else "")


def modules(names: tuple[str, ...]) -> str:
    """``embeddings, layers 0–1`` for the names of some modules."""
    indices = sorted(int(name.rpartition(".")[2]) for name in names if _is_layer(name))
    texts = []
    for name in names:
        if "embed" in name:
            texts.append("embeddings" if name == "tok_embeddings" else name)
    if len(indices) == 1:
        texts.append(f"layer {indices[0]}")
    elif indices:
        span = " ".join(map(str, indices))
        if indices == list(range(indices[0], indices[-1] + 1)):
            span = f"{indices[0]}–{indices[-1]}"
        texts.append(f"layers {span}")
    texts += [name for name in names if not _is_layer(name) and "embed" not in name]
    return ", ".join(texts)


def _is_layer(name: str) -> bool:
    """Whether a module's name ends with a number."""
    return name.rpartition(".")[2].isdigit()
