"""Who takes Replicated for PartialGradient, or the other way round, is told by name under every technique."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.parallel import Layout, PartialGradient, Plan, Replicated, apply, build_mesh, materialize
from mmm.parallel.dp.data_parallel import sync_gradients
from mmm.runtime.log import get_logger
from support.compiling import without_code
from support.own_model import CPU, FP64

HEAD = 8


class Attention(nn.Module):
    """A norm over the dim of each head, between matrices that tp shards, and one before them."""

    def __init__(self):
        super().__init__()
        self.norm, self.q_norm = nn.RMSNorm(16), nn.RMSNorm(HEAD)
        self.q, self.o = nn.Linear(16, 4 * HEAD), nn.Linear(4 * HEAD, 16)

    def forward(self, x):
        return x + self.o(torch.tanh(self.q_norm(self.q(self.norm(x)).unflatten(-1, (-1, HEAD)))).flatten(-2))


STYLES = {"*.norm": Replicated(), "*.q_norm": PartialGradient(), "*.q": ColwiseParallel(), "*.o": RowwiseParallel()}
WRONG = {"q_norm": Replicated(), "norm": PartialGradient()}
WORDS = {
    "q_norm": "q_norm.weight is Replicated(), and the ranks' gradients of it are not the same",
    "norm": "norm is PartialGradient(), for this rank's heads, channels or tokens, and each rank gives it the same",
}


def train(rank, wrong, layout, fields, first):
    """What is said in evaluation and two steps, each of two micro-batches; else the gradients of the norms."""
    torch.manual_seed(0)
    styles = STYLES | ({f"*.{wrong}": WRONG[wrong]} if wrong else {})
    plan = Plan(styles, fsdp_units=("*",), checkpointed=("*",), compiled=("*",), compiled_with_tp=("*",))
    model = nn.Sequential(Attention(), Attention())
    if first == "frozen":
        model.requires_grad_(False)
        for block in model:
            block.norm.weight.requires_grad_(True)
            block.q_norm.weight.requires_grad_(True)
    plain = nn.Sequential(Attention(), Attention()).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 3, 16, dtype=torch.float64)
    try:
        model = apply(model, build_mesh(layout, "cpu"), plan, FP64, **fields)
        materialize(model, CPU, 0)
        if first == "evaluation":
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        own = 8 // layout.dp
        for last, part in enumerate(x[layout.dp_coordinate(rank.rank) * own :][:own].chunk(2)):
            sync_gradients(model, bool(last))
            model(part).square().sum().backward()
    except LayoutError as error:
        return str(error)
    plain(x).square().sum().backward()
    norms = [
        (p, q) for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True) if "norm" in name
    ]
    return max(
        ((getattr(p.grad, "full_tensor", lambda p=p: p.grad)() - q.grad).abs().max() / q.grad.abs().max()).item()
        for p, q in norms
    )


TP2, DP2_TP2 = Layout(dp_shard=1, tp=2), Layout(dp_shard=2, tp=2)
CASES = {  # ddp does not go with tp
    "fsdp": (DP2_TP2, {}, ""),
    "evaluation": (TP2, {}, "evaluation"),
    "zero1": (DP2_TP2, {"data_parallel": "zero1"}, ""),
    "hsdp": (Layout(dp_replicate=2, dp_shard=1, tp=2), {}, ""),
    "checkpointing": (DP2_TP2, {"checkpointing": "full"}, "evaluation"),
    "selective": (TP2, {"checkpointing": "selective"}, ""),
    "frozen": (TP2, {}, "frozen"),
}
QUICK = {("q_norm", "fsdp"), ("norm", "fsdp")}
PAIRS = [(wrong, case) for wrong in ("", *WRONG) for case in CASES]


@pytest.mark.parametrize(
    ("wrong", "case"), [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS]
)
def test_told(run_on_ranks, wrong, case):
    layout, fields, first = CASES[case]
    for found in run_on_ranks(train, layout.ranks, wrong, layout, fields, first):
        if wrong:
            assert WORDS[wrong] in str(found)
        else:
            assert isinstance(found, float), found
            assert found < 1e-13


def compiled(rank):
    """What the log says; `train` with compile."""
    logger, said = get_logger(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with without_code():
            off = train(rank, "", TP2, {"compile": True}, "")
        return off, [text for text in said if "not compared" in text]
    finally:
        logger.removeHandler(handler)


@pytest.mark.long
def test_what_is_compiled_is_not_compared_and_that_is_said(run_on_ranks):
    (off, said), (_, nothing) = run_on_ranks(compiled, 2)
    assert off < 1e-13
    assert nothing == []
    (text,) = said
    assert text.startswith("compile: 0.norm, 1.norm, 0.q_norm (and 1 more) are compiled, where the ranks' gradients")
