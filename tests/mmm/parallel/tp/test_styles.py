"""Each style on each kind of module: right, or refused with the reason; never wrong without a word."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm.parallel import Layout, Plan, Replicated, apply, build_mesh, materialize
from support.module_kinds import DIM, KINDS, PLACES, TOKENS, VOCABULARY, Host
from support.own_model import CPU, FP64

RIGHT = "right"
MATRIX = ("Colwise", "Colwise, gathered", "Rowwise", "Rowwise, of full")
PARTIAL, SEQUENCE = ("Partial",), ("Sequence",)
EMBEDDINGS = tuple(kind for kind in KINDS if kind.startswith("Embedding,"))
NORMS = ("LayerNorm", "RMSNorm", "own norm", "GroupNorm", "BatchNorm1d")
BESIDE = ("GroupNorm", "BatchNorm1d", "Conv1d", "Conv2d", "ConvTranspose1d", "Bilinear", "PReLU", "EmbeddingBag")
INSIDE = ("MultiheadAttention", "keywords, dict", "ParameterList", "Sequential")
MANY = ("LSTM", "GRU", *INSIDE)
COMPUTED = ("weight_norm", "spectral_norm", "Linear with lora")
ALONE = r"SequenceParallel takes a module that computes each token by itself, .*: name it Replicated\(\)"
WIDTH = r"splits 7 columns, which 2 ranks do not divide: use a tp that does"
TWO = r"gives it one tensor, and its forward takes x, y: name it Replicated\(\)"
NO_MATRIX = (
    r"shards one matrix, that of a Linear, an Embedding or a Conv1D: (name the matrices inside it, or )?name it R"
)

# (places, kinds) and what is said; the first row that fits, and none: right. Those of SAID come while the model runs.
TABLE = [
    (tuple(PLACES), ("Linear, pruned",), r"does not reach its weight, which a hook computes from weight_orig"),
    (tuple(PLACES), ("Embedding, max_norm",), r"does not keep what max_norm writes into the weight in forward"),
    (MATRIX, COMPUTED, r"shards its own weight alone, and here others are part of it: name it Replicated\(\)"),
    (MATRIX, (*NORMS, *BESIDE, *MANY, "int8", "Dropout"), NO_MATRIX),
    (MATRIX, ("Linear of two",), TWO),
    (MATRIX, ("Linear, packed",), r"shards a matrix of 8 × 8, and its weight is \(8, 4\): name it Replicated\(\)"),
    (("Rowwise",), ("Embedding", *EMBEDDINGS), r"tokens for this rank's part of them: give it input_layouts=Replicate"),
    (("Colwise",), ("Linear, 7 wide",), WIDTH),
    (
        MATRIX[:2],
        ("Conv1D of three",),
        r"would split q, k and v, side by side in it, as one: SectionedColwise\(8, 8, 8\)",
    ),
    (PARTIAL, ("BatchNorm1d",), r"would normalize by the statistics of this rank's activations alone: use a norm of e"),
    (PARTIAL, ("Embedding, by frequency",), r"would count this rank's tokens alone: leave scale_grad_by_freq out"),
    (SEQUENCE, (*COMPUTED, *BESIDE, *MANY, "Embedding", *EMBEDDINGS), ALONE),
    (SEQUENCE, ("Linear, int8", "Linear, packed"), r"takes no integers, as in quantized weights: name it Replicated"),
    (SEQUENCE, ("Linear of two",), TWO),
]
SAID = [
    ((*MATRIX, "Sequence"), ("Linear, tuple",), r"kind \(Pair\): \w+ takes one tensor from it, not a tuple: name it R"),
]


def expected(place, kind):
    for rows, when in ((TABLE, "before"), (SAID, "while")):
        for places, kinds, words in rows:
            if place in places and kind in kinds:
                return (when, words) if words != RIGHT else RIGHT
    return RIGHT


def compute(place, kind):
    """ "right", what is off, or what is raised and whether it is before the model runs."""
    style, before, after, heads = PLACES[place]
    torch.manual_seed(0)
    model, plain = Host(kind, heads), Host(kind, heads).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    ids = (torch.arange(3 * TOKENS) % (VOCABULARY - 3)).roll(3).view(3, TOKENS)
    plan = Plan({"norm": Replicated(), "before": before, "kind": style, "after": after}, fsdp_units=())
    when = "before"
    try:
        model = apply(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), plan, FP64)
        materialize(model, CPU, 0)
        when = "while"
        output = model(x, ids)
        output.square().sum().backward()
    except LayoutError as error:
        return when, str(error)
    target = plain(x, ids)
    target.square().sum().backward()
    off = {"output": relative(output, target)}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        off[name] = relative(torch.zeros_like(q) if gradient is None else gradient, q.grad)
    return RIGHT if max(off.values()) < 1e-11 else str(off)


def relative(a, b):
    b = torch.zeros_like(a) if b is None else b
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def column(rank, place):
    return {kind: compute(place, kind) for kind in KINDS}


QUICK = ("Colwise",)


@pytest.mark.parametrize("place", [p if p in QUICK else pytest.param(p, marks=pytest.mark.long) for p in PLACES])
def test_right_or_refused(run_on_ranks, place):
    first, second = run_on_ranks(column, 2, place)
    assert first == second
    wrong = {}
    for kind, found in first.items():
        wanted = expected(place, kind)
        fits = found == wanted == RIGHT or (
            found != RIGHT != wanted and found[0] == wanted[0] and re.search(wanted[1], found[1])
        )
        if not fits:
            wrong[kind] = (found, wanted)
    assert not wrong
