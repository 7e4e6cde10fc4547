"""What a picture says in words: a layout's name, what its techniques mean, and what each operation is for."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.layout import UNSHARDED, Layout
from mmm_lab.planner.picture.facts import DATA, Facts, Flow

FEW = 64  # bytes: what a step sums besides
OPERATIONS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "FSDP (ZeRO-3)", "fsdp": "FSDP (ZeRO-3)"}
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
CP_NAMES = {"ring": "ring", "ulysses": "Ulysses", "usp": "ring of Ulysses groups"}
# What a flow is for: kind of axis, operation, part of the step.
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
# Of tp all-reduces without sequence parallelism, where every rank has all activations.
UNSCATTERED = {
    "forward": "activations: summed after a product, every rank has the sum",
    "backward": "gradients of activations, summed",
}


def title(facts: Facts) -> str:
    """Such as ``FSDP × tensor parallel``."""
    layout, technique = facts.layout, facts.techniques.data_parallel
    if layout.ranks == 1:
        return "One device"
    data = "HSDP" if layout.dp_replicate > 1 and layout.dp_shard > 1 else NAMES.get(technique, "HSDP")
    shown = {
        "pipeline": layout.pp > 1,
        data: layout.dp > 1 or (layout.cp > 1 and technique not in UNSHARDED),
        f"context parallel ({CP_NAMES[facts.techniques.cp_style]})": layout.cp > 1,
        "expert parallel": layout.ep > 1,
        "tensor parallel": layout.tp > 1,
    }
    names = [name for name, is_shown in shown.items() if is_shown]
    text = " × ".join(names)
    return text[:1].upper() + text[1:]


def sentences(facts: Facts) -> list[str]:
    """What each technique of the layout means."""
    layout, technique = facts.layout, facts.techniques.data_parallel
    if layout.ranks == 1:
        return ["One device has everything: weights, gradients, optimizer state and all samples. Nothing travels."]
    texts = []
    if layout.dp > 1 or layout.cp > 1:
        hybrid = layout.dp_replicate > 1 and layout.dp_shard > 1
        text = HELD["hsdp" if hybrid else "fsdp" if technique in ("zero3", "hsdp") else technique]
        texts.append(text.format(freed="and freed after it" if facts.frees_weights else "and stay until the step ends"))
    texts += [text for axis, text in AXES.items() if getattr(layout, axis) > 1]
    if layout.cp > 1:
        texts.append(CP[facts.techniques.cp_style])
    if layout.pp > 1:
        texts.append(f"The samples of a step go through the stages in {facts.held(0).microbatches} micro-batches.")
    if facts.between_products(0):
        texts.append(SEQUENCE)
    return texts


def others(layout: Layout, shown: Sequence[int]) -> str:
    """What stands for the ranks that are not drawn."""
    drawn = f"Ranks {shown[0]} to {shown[-1]} of {layout.ranks:,}."
    return f"{drawn} The others hold the parts of their own coordinates, and send as much."


def meaning(facts: Facts, flow: Flow) -> str:
    """What a flow is for; empty where nothing is known."""
    if flow.axis == "pp" and flow.operation == "send" and facts.loops:
        return "activations, and in backward their gradients, between stages"
    kind = "data" if flow.axis in DATA else flow.axis
    if flow.axis.startswith("cp") and flow.operation in ("send", "all_to_all"):
        kind = "cp"  # of attention: over cp FSDP gathers and reduces as well
    if (kind, flow.operation, flow.part) == ("data", "all_gather", "forward") and not facts.frees_weights:
        return "a layer's weights, before it computes; they stay until the step ends"
    if (kind, flow.operation) == ("tp", "all_reduce") and flow.part in UNSCATTERED and not facts.between_products(0):
        return UNSCATTERED[flow.part]
    small = "a few numbers: the gradients' norm, the loss"
    if flow.operation == "all_reduce" and flow.part == "optimizer" and flow.sent / flow.calls < FEW:
        return small
    return MEANINGS.get(f"{kind} {flow.operation} {flow.part}", small if flow.sent / flow.calls < 16 * FEW else "")


def modules(names: tuple[str, ...]) -> str:
    """``embeddings, layers 0–1`` of modules' names."""
    layers = [name for name in names if name.rpartition(".")[2].isdigit()]
    numbers = sorted(int(name.rpartition(".")[2]) for name in layers)
    span = " ".join(map(str, numbers))
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        span = f"{numbers[0]}–{numbers[-1]}"
    texts = ["embeddings" if name == "tok_embeddings" else name for name in names if "embed" in name]
    if numbers:
        texts.append(f"layer{'s' * (len(numbers) > 1)} {span}")
    return ", ".join([*texts, *(name for name in names if name not in layers and "embed" not in name)])
