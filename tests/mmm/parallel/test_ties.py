"""Tied weights stay one weight under every technique, or are refused by their names."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from mmm.comparison import worst
from mmm.data import Batch
from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn import weights
from mmm.nn.experts import has_experts
from mmm.parallel import Layout, build_mesh, materialize, meta_parameters, parallelize
from mmm.parallel.dp.wrapped import Wrapper
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.pp.ties import stage_ties
from mmm.parallel.ties import find_ties
from mmm.parallel.tp.replicated import Replicated
from mmm.run.save_model import full_tensors, second_names
from mmm.runtime.process_group import gather_floats
from mmm_lab.parity.subject import make_batch
from support.clock import PATIENCE
from support.gradients import gradient_differences
from support.own_model import FP64
from support.parity_models import plain_gpt

CPU = torch.device("cpu")
TIE = ("tokens.weight", "head.weight")
STEPS, RATE, MAX_NORM = 2, 0.3, 0.05


def batch_of(step):
    """Inputs and targets of 16 samples, (16, 32) each."""
    batch = make_batch(plain_gpt.PARITY, "made_up", 16, step)
    return batch["inputs"], batch["targets"]


@lru_cache
def plain(make=plain_gpt.small_model):
    """Losses, gradients of the first step, norms before clipping, and the state at the end, by plain PyTorch."""
    model = make().double()
    weights.initialize(model, 0)
    losses, norms, first = [], [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        inputs, targets = batch_of(step)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, norms, model.state_dict()


def train(
    rank, layout, techniques, gradients, tied=TIE, make=plain_gpt.small_model, make_plan=plain_gpt.plain_gpt_plan
):
    with meta_parameters():
        model = make()
    plan = make_plan()
    techniques = Techniques(**techniques)
    inputs, _ = batch_of(0)
    partition = partition_model(model, plan, layout, techniques, inputs[: len(inputs) // layout.dp].to("meta"))
    mesh = build_mesh(layout, "cpu", experts=has_experts(model))
    made = ParallelModel(model, plan, mesh, FP64, techniques, partition, device=CPU, seed=0)
    module = next(iter(made.modules.values()))
    inner = module.module if isinstance(module, Wrapper) else module
    losses, norms, differences = [], [], {}
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    for step in range(STEPS):
        assert not tied or find_ties(inner) == [tied]
        inputs, targets = batch_of(step)
        size = len(inputs) // layout.dp
        rows = slice(layout.dp_coordinate(rank.rank) * size, (layout.dp_coordinate(rank.rank) + 1) * size)
        loss = made.forward_backward(Batch(inputs[rows], targets[rows], targets.numel()))
        if step == 0:
            differences = gradient_differences(made, gradients)
        norms.append(float(made.clip(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        made.balance_experts(0.0)
        shares = gather_floats([loss.item()], CPU)
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    state = dict(full_tensors(made.modules.values()))
    state |= {name: state[first] for name, first in second_names(made.modules.values()).items()}
    return losses, differences, norms, state, [name for name, _ in made.named_parameters()]


DP2 = Layout(dp_shard=2)
TP2 = Layout(dp_shard=1, tp=2)
CASES = [
    (DP2, {"data_parallel": "ddp"}),
    (DP2, {"offload": True, "loss_chunks": 3, "microbatches": 2}),
    (Layout(dp_shard=2, tp=2), {}),
]
# The parity of the GPT, whose weights are tied, has the layouts with nothing else on them.
LONG = [
    (DP2, {"data_parallel": "zero2", "loss_chunks": 3}),
    (Layout(dp_shard=2, tp=2), {"loss_chunks": 3}),
    (TP2, {"loss_chunks": 3}),
    (DP2, {"data_parallel": "ddp", "loss_chunks": 3}),
    (DP2, {"checkpointing": "selective", "loss_chunks": 4}),
    (DP2, {"compile": True}),
    (Layout(dp_shard=1, cp=2), {"cp_style": "ulysses", "loss_chunks": 2}),
    (Layout(dp_shard=2, tp=2), {"loss_chunks": 3, "offload": True, "checkpointing": "full"}),
]


@pytest.mark.parametrize(
    ("layout", "techniques"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_one_weight(run_on_ranks, layout, techniques):
    losses, gradients, norms, state = plain()
    for got in run_on_ranks(train, layout.ranks, layout, techniques, gradients, timeout=PATIENCE):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert worst(got[1].values()) <= 1e-8, worst(got[1], key=got[1].get)
        # counted once
        assert got[2] == pytest.approx(norms, rel=1e-9)
        assert got[4] == list(gradients)
        assert got[3].keys() == state.keys()
        for name, tensor in state.items():
            assert torch.allclose(got[3][name].to(tensor.dtype), tensor, rtol=1e-9, atol=1e-12), name


# ---- the Transformer, also over stages

LLAMA = TransformerConfig(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48, vocab_size=97, tie_word_embeddings=True
)


def dense():
    return Transformer(LLAMA)


def experts():
    return Transformer(replace(LLAMA, n_experts=4, expert_dim=24))


PP2 = Layout(pp=2, dp_shard=1)
STAGES = [
    # Rank 0 has both of its stages.
    (dense, PP2, {"schedule": "ZBVZeroBubble", "loss_chunks": 2}),
    (dense, Layout(pp=2, dp_shard=2), {"schedule": "Interleaved1F1B"}),
    (experts, Layout(dp_shard=2, ep=2), {}),
]
STAGES_LONG = [
    (dense, Layout(pp=2, dp_replicate=2, dp_shard=1), {}),
    (dense, Layout(pp=4, dp_shard=1), {"microbatches": 4}),
    (dense, Layout(pp=2, dp_shard=1), {"offload": True, "checkpointing": "full"}),
    (experts, Layout(pp=2, dp_shard=2, ep=2), {}),
]


@pytest.mark.parametrize(
    ("make", "layout", "techniques"),
    [*STAGES, *(pytest.param(*case, marks=pytest.mark.long) for case in STAGES_LONG)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_weight_of_the_transformer(run_on_ranks, make, layout, techniques):
    losses, gradients, norms, expected = plain(make)
    tied = ("tok_embeddings.weight", "output.weight") if layout.pp == 1 else ()
    off, seen = {}, set()
    arguments = (layout, techniques, gradients, tied, make, transformer_plan)
    for got in run_on_ranks(train, layout.ranks, *arguments, timeout=PATIENCE):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert worst(got[1].values()) <= 1e-8, worst(got[1], key=got[1].get)
        # Counted once, whatever stages have it.
        assert got[2] == pytest.approx(norms, rel=1e-9)
        assert set(got[4]) <= set(gradients)
        seen |= set(got[4])
        off |= got[3]
    assert seen == set(gradients)
    assert off.keys() == expected.keys()
    assert torch.equal(off["output.weight"], off["tok_embeddings.weight"])
    for name, tensor in expected.items():
        assert torch.allclose(off[name].to(tensor.dtype), tensor, rtol=1e-9, atol=1e-12), name


# ---- other ties


class Ties(nn.Module):
    """One module in two places; and a weight that is shared with what is in no unit."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.blocks.append(self.blocks[0])
        self.root = nn.Linear(8, 8, bias=False)
        self.root.weight = self.inside.weight

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.root(x)


PLAN = Plan(
    tensor={"inside": Replicated(), "blocks.*.0": Replicated(), "root": Replicated()},
    fsdp_units=("inside", "blocks.*"),
    stages=("inside", "blocks.*", "root"),
)


def others(rank, layout, expected):
    with meta_parameters():
        model = Ties()
    ties = find_ties(model)
    mesh = build_mesh(layout, "cpu")
    parallelize(model, mesh, PLAN, FP64)
    materialize(model, CPU, 0, init="by_name")
    x = torch.ones(2, 8, dtype=torch.float64) * (rank.rank + 1 if layout.dp > 1 else 1)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    assert find_ties(model) == ties
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [DP2, TP2], ids=str)
def test_a_module_in_two_places_and_a_weight_of_the_root(run_on_ranks, layout):
    model = Ties().double()
    weights.initialize(model, 0)
    for factor in range(1, 1 + layout.dp):
        model(torch.ones(2, 8, dtype=torch.float64) * factor).square().sum().backward()
    for gradients in run_on_ranks(others, 2, layout, None):
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-10), name


# ---- what is refused


def unlike_stages(rank):
    plan = transformer_plan()
    plan = replace(plan, tensor=plan.tensor | {"output": RowwiseParallel(input_layouts=Replicate())})
    try:
        train(rank, Layout(pp=2, dp_shard=1, tp=2), {}, {}, make=dense, make_plan=lambda: plan)
    except LayoutError as error:
        return str(error)


def test_a_tie_whose_stages_have_other_shards_is_refused(run_on_ranks):
    for message in run_on_ranks(unlike_stages, 4):
        assert "tok_embeddings.weight and output.weight" in message
        assert "stage 1 output.weight as" in message
        assert "or untie them" in message


def test_a_name_in_no_stage():
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["tokens"].weight
    with pytest.raises(LayoutError, match=r"puts head\.weight into no pipeline stage"):
        stage_ties(model, [["tokens"]])
