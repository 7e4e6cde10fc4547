"""Loss scaling: an element that is infinite on one rank alone makes all ranks skip the step, on every layout."""

import math
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmm.data import Batch
from mmm.layout import Techniques
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.optim.grad_scaler import GradScaler, not_finite
from mmm.parallel import Layout, build_mesh, clip_grad_norm
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import reference, vision
from support.own_model import FP64

CPU = torch.device("cpu")
FP16 = Precision("fp16", torch.float32, torch.float16)
EXPERTS = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=256, n_experts=4, expert_dim=24)
PLANS = {"cnn": cnn_plan, "vit": vit_plan, "experts": transformer_plan}
# The last row of each is one rank's alone under tp, ZeRO and FSDP; and no parameter of it comes first in its model.
PLANTED = {"cnn": "fc1.weight", "vit": "layers.1.mlp.fc1.weight", "experts": "layers.0.moe.experts.w2"}
# In steps 1 and 3 a gradient overflows.
STEPS, SKIPPED = 6, (1, 3)
# The first scale, and the learning rate.
SCALE, RATE = 2.0**16, 0.1


def build(model: str) -> nn.Module:
    if model == "experts":
        return Transformer(EXPERTS)
    return vision.build(model)


def batch(model: str, step: int):
    """Inputs, targets and their number, of the global batch."""
    if model == "experts":
        full = reference.tokens().batch(step, reference.GLOBAL_BATCH, 0, reference.GLOBAL_BATCH)
        return full.inputs, full.targets, full.count
    return *vision.batch(model, step), vision.GLOBAL_BATCH


def plant(parameter: nn.Parameter) -> None:
    """Make the last element of a gradient infinite, on the ranks that hold it."""
    box = local_box(parameter)
    if all(first + n == size for first, n, size in zip(box.start, box.length, box.full, strict=True)):
        to_local(parameter.grad).view(-1)[-1] = math.inf


@lru_cache
def expected(model: str) -> list[float]:
    """Losses of plain PyTorch on one process, which leaves the steps out that have an infinite gradient."""
    net = build(model).double()
    weights.initialize(net, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        inputs, targets, _ = batch(model, step)
        loss = F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        if step not in SKIPPED:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(rank, model, layout, data_parallel, clipped, precision=FP64, scale=SCALE):
    """Losses; after each step the scale, and whether it was skipped; the norms that clipping saw.

    Overflows are planted, but in fp16, which has its own.
    """
    plan = PLANS[model]()
    techniques = Techniques(data_parallel=data_parallel)
    with torch.device("meta"):
        full = build(model)
    size = len(batch(model, 0)[0]) // layout.dp
    sample = batch(model, 0)[0][:size].to("meta", None if model == "experts" else torch.float32)
    partition = partition_model(full, plan, layout, techniques, sample)
    mesh = build_mesh(layout, "cpu", experts=model == "experts")
    made = ParallelModel(full, plan, mesh, precision, techniques, partition, device=CPU, seed=0)
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE, foreach=False)
    scaler = GradScaler("cpu", scale)
    (planted,) = (p for name, p in made.named_parameters() if name == PLANTED[model])
    losses = []
    scales = []
    skipped = []
    norms = []
    for step in range(STEPS):
        first = layout.dp_coordinate(rank.rank) * size
        inputs, targets, count = batch(model, step)
        inputs = inputs.to(precision.storage) if inputs.is_floating_point() else inputs
        share = made.forward_backward(
            Batch(inputs[first : first + size], targets[first : first + size], count), scaler
        ).item()
        if step in SKIPPED and precision is FP64:
            plant(planted)
        if clipped:
            scaler.unscale_(optimizer)
            norms.append(made.clip(1e9).item())
        scaler.step(optimizer)
        scaler.update()
        skipped.append(bool(scaler.found_inf))
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        # Each tp rank has worked out the same loss, by its own copy of what is replicated.
        shares = [value for (value,) in gather_floats([share], CPU)]
        own_tp = layout.coordinates(rank.rank)["tp"]
        same_tp = [r for r in range(layout.ranks) if layout.coordinates(r)["tp"] == own_tp]
        losses.append(sum(shares[r] for r in same_tp))
    return losses, scales, skipped, norms


@pytest.mark.parametrize(
    ("model", "layout", "data_parallel"),
    [
        ("cnn", Layout(dp_shard=1), "fsdp"),
        pytest.param("vit", Layout(dp_shard=2, tp=2), "fsdp", marks=pytest.mark.long),
        ("vit", Layout(dp_replicate=2, dp_shard=1, tp=2), "hsdp"),
        pytest.param("cnn", Layout(dp_shard=3), "zero2", marks=pytest.mark.long),
        pytest.param("experts", Layout(dp_shard=2, tp=2, ep=2), "fsdp", marks=pytest.mark.long),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("clipped", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "clipped"])
def test_all_ranks_skip_the_same_steps(run_on_ranks, model, layout, data_parallel, clipped):
    halved = [SCALE / 2 ** sum(skip <= step for skip in SKIPPED) for step in range(STEPS)]
    for losses, scales, skipped, norms in run_on_ranks(train, layout.ranks, model, layout, data_parallel, clipped):
        assert skipped == [step in SKIPPED for step in range(STEPS)]
        assert scales == halved
        assert losses == pytest.approx(expected(model), rel=1e-9)
        assert [math.isfinite(norm) for norm in norms] == ([step not in SKIPPED for step in range(STEPS)]) * clipped


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(dp_shard=1, tp=4), marks=pytest.mark.long), Layout(dp_shard=2, tp=2)], ids=str
)
def test_overflows_of_fp16(run_on_ranks, layout):
    """At a scale at which some steps overflow fp16 and others do not, all ranks skip those that one rank skips."""
    ((alone, scales, skipped, _),) = run_on_ranks(train, 1, "cnn", Layout(dp_shard=1), "fsdp", False, FP16, 2.0**20)
    assert 0 < sum(skipped) < STEPS
    for got in run_on_ranks(train, 4, "cnn", layout, "fsdp", False, FP16, 2.0**20):
        assert got[0] == pytest.approx(alone, rel=2e-3)
        assert got[1:3] == (scales, skipped)


def nothing_here(rank):
    """A rank that holds no gradient at all, beside one that has an infinite one."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(parameter.sum())
    if rank.rank == 1:
        parameter.grad = torch.tensor([1.0, math.nan])
    scaler.step(optimizer)
    scaler.update()
    return bool(scaler.found_inf), scaler.get_scale(), parameter.tolist()


def test_a_rank_without_gradients(run_on_ranks):
    assert run_on_ranks(nothing_here, 2) == [(True, 4.0, [0.0, 0.0])] * 2


def test_alone_as_pytorch():
    """Without ranks it does what PyTorch's does, and a disabled one does nothing."""
    steps = []
    for kind in (torch.amp.GradScaler, GradScaler):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        # The first steps overflow float32.
        scaler = kind("cpu", 2.0**127, growth_interval=2)
        for _ in range(8):
            scaler.scale((parameter * 3).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps.append((scaler.get_scale(), parameter.tolist()))
    assert steps[:8] == steps[8:]
    assert steps[0][0] == 2.0**126
    off = GradScaler("cpu", enabled=False)
    off.unscale_(optimizer)
    assert off.scale(parameter) is parameter
    assert off.found_inf is None


def test_gradients_in_half_precision_are_refused():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    parameter.grad = torch.ones(1, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter])
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
    assert clip_grad_norm([parameter], 1.0).isfinite()


def flags_of(rank, losses, gradients):
    """What `not_finite` says of a rank's loss and gradients; a rank may have none."""
    norms = torch.tensor(gradients[rank.rank], dtype=torch.float64)
    return not_finite(torch.tensor(losses[rank.rank], dtype=torch.float64), norms).item()


@pytest.mark.parametrize(
    ("losses", "gradients", "expected"),
    [
        ((1.0, 2.0), ((), ()), 0.0),
        ((1.0, 2.0), ((), (3.0, 4.0)), 0.0),
        ((1.0, 2.0), ((), (3.0, math.inf)), 1.0),
        ((1.0, math.nan), ((), ()), 1.0),
        ((math.inf, 1.0), ((), (3.0,)), 1.0),
    ],
    ids=str,
)
def test_ranks_without_gradients(run_on_ranks, losses, gradients, expected):
    assert run_on_ranks(flags_of, 2, losses, gradients) == [expected] * 2
