"""Loss in chunks: the same losses and gradients as whole, and less at once."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmm.errors import ConfigError
from mmm.layout import PADDING
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.model import ViT
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.parallel import Layout, loss_of
from mmm.parallel.memory.chunked_loss import apply_chunked_loss
from mmm.parallel.memory.measure import Peak
from support import anywhere, reference, vision

CPU = torch.device("cpu")
F64 = torch.float64
SEQ, VOCAB = 48, 2048
LARGE = TransformerConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=512, vocab_size=VOCAB)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.bytes = max(self.bytes, local.nbytes)
        return out


def large_model(chunks: int):
    model = Transformer(LARGE).double()
    weights.initialize(model, reference.SEED)
    apply_chunked_loss(model, transformer_plan(), chunks, F64)
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (2, SEQ + 1), generator=numbers)
    return model, rows[:, :-1], rows[:, 1:]


def one_step(chunks: int):
    """Loss, gradients, the largest tensor and the peak of a step in bytes."""
    model, inputs, targets = large_model(chunks)
    loss_fn = loss_of(model)
    with Largest() as largest:
        loss = loss_fn(model(inputs), targets, targets.numel())
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with Peak(CPU, model) as peak:
        loss_fn(model(inputs), targets, targets.numel()).backward()
    return loss.item(), gradients, largest.bytes, peak.bytes


LOGITS = 2 * SEQ * VOCAB * 8  # bytes


def test_the_whole_never_exists():
    """The largest tensor shrinks with the pieces, and so does the peak; unsharded weights are smaller than a chunk."""
    plain_loss, plain, largest, peak = one_step(1)
    assert largest >= LOGITS
    assert peak > LOGITS
    loss, gradients, piece, less = one_step(6)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert gradients.keys() == plain.keys()
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-11 * gradient.abs().max(), name
    assert piece <= max(LOGITS / 6, 2 * SEQ * LARGE.hidden_dim * 8, 8 * LARGE.vocab_size * LARGE.dim)
    assert less < peak - 0.8 * LOGITS


def test_targets_that_are_none():
    """Whether full logits or in chunks, what has no target counts for nothing: loss and gradients of the others."""
    found = []
    for chunks in (1, 5):
        model, inputs, targets = large_model(chunks)
        targets = targets.clone()
        targets[0, 5:30], targets[1, -3:] = PADDING, PADDING
        loss = loss_of(model)(model(inputs), targets, 68)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for whole, chunked in zip(*found, strict=True):
        assert (chunked - whole).abs().max() <= 1e-12 * whole.abs().max()
    model, inputs, targets = large_model(1)
    real = [(0, slice(0, 5)), (0, slice(30, None)), (1, slice(0, -3))]
    parts = [torch.nn.functional.cross_entropy(model(inputs)[at], targets[at], reduction="sum") for at in real]
    assert sum(parts).item() / 68 == pytest.approx(found[0][0].item(), rel=1e-12)


LAYOUTS = [
    (Layout(dp_shard=2), {"accumulate": 2}),
    (Layout(dp_shard=1, tp=2), {}),
]
LONG = [
    (Layout(dp_shard=1, cp=2), {}),
    (Layout(pp=2, dp_shard=1), {"accumulate": 4}),
    (Layout(dp_shard=2, tp=2), {}),
    (Layout(dp_shard=1, cp=2, tp=2), {}),
    (Layout(pp=2, dp_shard=1, tp=2), {"accumulate": 4}),
    (Layout(pp=2, dp_shard=2), {"accumulate": 2, "schedule": "ZBVZeroBubble"}),
]


@pytest.mark.parametrize(
    ("layout", "techniques"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_same_as_whole(run_on_ranks, layout, techniques):
    ranks = run_on_ranks(train, layout.ranks, layout, {"loss_chunks": 3}, techniques)
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2))


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


@pytest.mark.parametrize("technique", ["ddp", pytest.param("zero1", marks=pytest.mark.long), "zero2"])
def test_copies(run_on_ranks, technique):
    pieces = {"loss_chunks": 3, "data_parallel": technique}
    ranks = run_on_ranks(train, 2, Layout(dp_shard=2), pieces, {"accumulate": 2})
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2))


def test_a_vocabulary_that_tp_does_not_divide(run_on_ranks):
    config = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=48, vocab_size=259)
    ranks = run_on_ranks(train, 4, Layout(dp_shard=1, tp=4), {"loss_chunks": 3}, {"config": config})
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2, config))


# ---- what is refused


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: apply_chunked_loss(ViT(vision.CONFIGS["vit"]), vit_plan(), 2, F64), "2: .* names no output matrix"),
        (lambda: apply_chunked_loss(Transformer(LARGE), transformer_plan(), 0, F64), "loss_chunks 0"),
    ],
)
def test_refused(refused, words):
    with pytest.raises(ConfigError, match=words):
        refused()
