"""Each style on each kind of module: right, or refused with the reason; never wrong without a word."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmm.errors import DeviceError, LayoutError
from mmm.parallel import Layout, Plan, Replicated, build_mesh, materialize, parallelize
from mmm.torch_private.faults import INTEGERS, met
from mmm.torch_private.faults import MATRIX as A_MATRIX
from support.module_kinds import DIM, KINDS, PLACES, TOKENS, VOCABULARY, Host
from support.own_model import CPU, FP64

RIGHT, ERROR = "right", "an error of PyTorch's"
# Groups of kinds that have the same outcome.
MATRIX = ("Colwise", "Colwise, gathered", "Rowwise", "Rowwise, of full")
PARTIAL, SEQUENCE = ("Partial",), ("Sequence",)
EMBEDDINGS = tuple(kind for kind in KINDS if kind.startswith("Embedding,"))
NORMS = ("LayerNorm", "RMSNorm", "own norm", "GroupNorm", "BatchNorm1d")
BESIDE = ("GroupNorm", "BatchNorm1d", "Conv1d", "Conv2d", "ConvTranspose1d", "Bilinear", "PReLU", "EmbeddingBag")
INSIDE = ("MultiheadAttention", "keywords, dict", "ParameterList", "Sequential")
MANY = ("LSTM", "GRU", *INSIDE)
COMPUTED = ("weight_norm", "spectral_norm", "Linear with lora")
MATRICES = tuple(kind for kind in KINDS if kind.startswith(("Linear", "Conv1D")) and kind not in COMPUTED)
ALONE = r"SequenceParallel takes a module that computes each token by itself, .*: name it Replicated\(\)"
WIDTH = r"splits 7 columns, which 2 ranks do not divide: use a tp that does"
NO_MATRIX = (
    r"shards one matrix, that of a Linear, an Embedding or a Conv1D: (name the matrices inside it, or )?name it R"
)

# (places, kinds) and what is said; the first row that fits, and none: right.
TABLE = [
    (
        MATRIX,
        (*COMPUTED, "Linear, pruned"),
        r"shards only the module's own weight, and here others are part of it: name it Replicated\(\)",
    ),
    (MATRIX, (*NORMS, *BESIDE, *MANY, "int8", "Dropout"), NO_MATRIX),
    (MATRIX, ("Linear, packed",), r"shards a matrix of 8 × 8, and its weight is \(8, 4\): name it Replicated\(\)"),
    (("Rowwise",), ("Embedding", *EMBEDDINGS), r"tokens for this rank's part of them: give it input_layouts=Replicate"),
    (("Colwise",), ("Linear, 7 wide",), WIDTH),
    (
        MATRIX[:2],
        ("Conv1D of three",),
        r"would split q, k and v, side by side in it, as one: SectionedColwise\(8, 8, 8\)",
    ),
    (PARTIAL, ("BatchNorm1d",), r"would normalize by the statistics of only this rank's activations: use a norm of e"),
    (PARTIAL, ("Embedding, by frequency",), r"would count only this rank's tokens: leave scale_grad_by_freq out"),
    (SEQUENCE, (*COMPUTED, *BESIDE, *MANY, "Embedding", *EMBEDDINGS), ALONE),
]
# What this PyTorch cannot do. Integers are refused first.
FAULTS = [
    (SEQUENCE, MATRICES, ("SequenceParallel", A_MATRIX)),
    (tuple(PLACES), ("Linear, int8", "Linear, packed"), (INTEGERS,)),
]
for places, kinds, choices in FAULTS:
    TABLE[:0] = [(places, kinds, re.escape(str(fault))) for fault in met(choices)]
# (places, kinds) that PyTorch itself refuses, in its own words.
TORCHS = [
    ((*MATRIX, *SEQUENCE), ("Linear of two", "Linear, tuple")),
    (("Replicated", *PARTIAL), ("Linear, pruned",)),
    (tuple(PLACES), ("Embedding, max_norm",)),
    (SEQUENCE, ("Linear, int8", "Linear, packed")),
]
if met(("SequenceParallel", A_MATRIX)):
    # A matrix that only its own forward knows.
    TORCHS.append((SEQUENCE, ("int8",)))


def expected(place, kind):
    for places, kinds, message in TABLE:
        if place in places and kind in kinds:
            return message
    if any(place in places and kind in kinds for places, kinds in TORCHS):
        return ERROR
    return RIGHT


def compute(place, kind):
    """RIGHT, ERROR, what is off, or what is said."""
    style, before, after, heads = PLACES[place]
    torch.manual_seed(0)
    model = Host(kind, heads)
    plain = Host(kind, heads).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    ids = (torch.arange(3 * TOKENS) % (VOCABULARY - 3)).roll(3).view(3, TOKENS)
    plan = Plan({"norm": Replicated(), "before": before, "kind": style, "after": after}, fsdp_units=())
    try:
        model = parallelize(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), plan, FP64)
        materialize(model, CPU, 0)
        output = model(x, ids)
        output.square().sum().backward()
    except (LayoutError, DeviceError) as error:
        return str(error)
    except (RuntimeError, TypeError, AttributeError):
        return ERROR
    target = plain(x, ids)
    target.square().sum().backward()
    off = {"output": relative(output, target)}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        off[name] = relative(torch.zeros_like(q) if gradient is None else gradient, q.grad)
    if max(off.values()) < 1e-11:
        return RIGHT
    return str(off)


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
    for kind, result in first.items():
        wanted = expected(place, kind)
        if wanted in (RIGHT, ERROR):
            fits = result == wanted
        else:
            fits = re.search(wanted, result)
        if not fits:
            wrong[kind] = (result, wanted)
    assert not wrong
