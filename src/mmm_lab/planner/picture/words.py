"""The texts of a picture: what each call is for, and between which ranks."""

from __future__ import annotations

from mmm_lab.planner.picture.facts import DATA, Facts, Flow

FEW = 64  # bytes of a call: an all-reduce of less sums the loss or a norm
NUMBERS = "a few numbers, such as the loss and the gradients' norm"
MOST_RANKS = 8  # of a group that are named
# What a flow is for, by kind of axis, operation and part of the step.
MEANINGS = dict(
    line.split(": ", 1)
    for line in """
data all_gather forward: a layer's weights, before it computes
data all_gather backward: the same weights again, for the gradients
data all_gather optimizer: the rows of the weights that other ranks have updated
data reduce_scatter backward: gradients: summed, each rank keeps its rows
data all_reduce backward: gradients: summed, every rank has the sum
tp all_gather forward: activations: the tokens of all, before a product
tp reduce_scatter forward: activations: summed after a product, each keeps its tokens
tp all_gather backward: gradients of activations, the other way
tp reduce_scatter backward: gradients of activations, the other way
tp all_reduce forward: activations, summed after a product; the loss, of which each rank has a part of the vocabulary
tp all_reduce backward: gradients of activations, or of the norms, which every rank has
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


def meaning(facts: Facts, flow: Flow) -> str:
    """What a flow is for."""
    # All axes that gradients are summed over mean the same.
    kind = flow.axis
    if flow.axis in DATA:
        kind = "data"
    if flow.axis.startswith("cp") and flow.operation in ("send", "all_to_all"):
        # Attention. FSDP also gathers and reduces over cp.
        kind = "cp"
    if kind == "pp" and flow.operation == "send" and facts.loops:
        return "activations, and in backward their gradients, between stages"
    # Every step sums the loss over the ranks, and clipping the norms.
    if flow.operation == "all_reduce" and flow.doing == "optimizer" and kind != "pp" and flow.sent < FEW * flow.calls:
        return NUMBERS
    return MEANINGS.get(f"{kind} {flow.operation} {flow.doing}", NUMBERS)


def whom(facts: Facts, rank: int, flow: Flow) -> str:
    """The ranks of the group, as ``ranks 0 1``; ``0 → 1`` where each sends to the next, ``1 → 0`` to the one before."""
    names = [str(member) for member in facts.group(rank, flow.axis)]
    if len(names) > MOST_RANKS:
        names[3:-1] = ["…"]
    if flow.operation != "send":
        return f"ranks {' '.join(names)}"
    if flow.axis == "pp" and flow.doing == "backward":
        names.reverse()
    return f"ranks {' → '.join(names)}"
