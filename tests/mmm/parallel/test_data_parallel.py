"""What the data-parallel techniques hold, refuse, and give back; and several backwards a step. Ranks whose samples use
other parameters, without FSDP: gradients are those of plain PyTorch on the full batch. A parameter that is not used has
the gradient zero."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from mmm.errors import ConfigError, LayoutError
from mmm.layout import check_data_parallel
from mmm.models.cnn.plan import cnn_plan
from mmm.parallel import (
    Layout,
    Mesh,
    Techniques,
    build_mesh,
    clip_grad_norm,
    cross_entropy,
    materialize,
    parallelize,
    sync_gradients,
)
from mmm.parallel.dp.data_parallel import apply_data_parallel
from mmm.runtime.device import Precision
from support import anywhere, reference, vision
from support.own_model import FP64, build, furthest, gradients, own, parameters, plain

CPU = torch.device("cpu")
TECHNIQUES = ["ddp", "zero1", "zero2", "fsdp"]


def cut(layout, technique, model=None, precision=FP64):
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        model = model or vision.build("cnn")
    model = parallelize(model, mesh, cnn_plan(), precision, data_parallel=technique)
    materialize(model, CPU, vision.SEED)
    return model


def share(rank, layout, step=0):
    """This rank's part of a global batch."""
    size = vision.GLOBAL_BATCH // layout.dp
    first = layout.dp_coordinate(rank.rank) * size
    return (full[first : first + size] for full in vision.batch("cnn", step))


def accumulate(rank, technique, at_the_end: bool):
    """A step of two micro-batches, then one of one."""
    layout = Layout(dp_shard=2)
    model = cut(layout, technique)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    norms = []
    for micro in (2, 1):
        images, classes = share(rank, layout)
        for i, piece in enumerate(zip(images.chunk(micro), classes.chunk(micro), strict=True)):
            # With each micro-batch, or with the last.
            sync_gradients(model, i == micro - 1 or not at_the_end)
            cross_entropy(model(piece[0]), piece[1], vision.GLOBAL_BATCH).backward()
            if technique.startswith("zero") and at_the_end and i < micro - 1:
                assert all(p.grad is None for p in model.parameters()), "summed over the ranks too early"
        norms.append(clip_grad_norm(model.parameters(), float("inf")).item())
        optimizer.step()
        # The second step adds to zeros, not to None.
        optimizer.zero_grad(set_to_none=micro == 1)
    return norms


@pytest.mark.parametrize(
    ("technique", "at_the_end"),
    [
        pytest.param(
            technique,
            at_the_end,
            id=f"{technique}-summed {'at the end' if at_the_end else 'every time'}",
            marks=() if at_the_end == (technique in ("ddp", "zero2")) else pytest.mark.long,
        )
        for technique in TECHNIQUES
        for at_the_end in (True, False)
    ],
)
def test_micro_batches_add_up(run_on_ranks, technique, at_the_end):
    net = vision.build("cnn").double()
    net.load_state_dict(initial())
    images, classes = vision.batch("cnn", 0)
    expected = []
    for _ in range(2):
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(images), classes).backward()
        expected.append(torch.nn.utils.get_total_norm(p.grad for p in net.parameters()).item())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.3 * parameter.grad
    for norms in run_on_ranks(accumulate, 2, technique, at_the_end):
        assert norms == pytest.approx(expected, rel=1e-12)


def initial():
    from mmm.nn import weights

    net = vision.build("cnn").double()
    weights.initialize(net, vision.SEED)
    return net.state_dict()


def mixed(rank, technique):
    """bf16 compute: the dtypes, and how far the loss is from that in float32."""
    layout, losses = Layout(dp_shard=2), []
    for precision in (
        Precision("bf16", torch.float32, torch.bfloat16),
        Precision("fp32", torch.float32, torch.float32),
    ):
        model = cut(layout, technique, precision=precision)
        images, classes = share(rank, layout)
        logits = model(images.float())
        loss = cross_entropy(logits, classes, vision.GLOBAL_BATCH)
        loss.backward()
        losses.append(loss.item())
        # Weights and gradients stay in float32.
        dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        assert dtypes == {torch.float32}
        assert logits.dtype == precision.compute
    return abs(losses[0] / losses[1] - 1)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_mixed_precision(run_on_ranks, technique):
    for off in run_on_ranks(mixed, 2, technique):
        # bf16 rounds, and by no more than its digits allow.
        assert 0 < off < 0.02


def too_soon_and_too_late(rank):
    mesh = build_mesh(Layout(dp_shard=1), "cpu")
    for technique in ("ddp", "zero1"):
        with torch.device("meta"):
            model = vision.build("cnn")
        model = parallelize(model, mesh, cnn_plan(), FP64, data_parallel=technique)
        with pytest.raises(RuntimeError, match=r"call parallel\.materialize"):
            model(torch.zeros(1))
        materialize(model, CPU, 0)
        with pytest.raises(RuntimeError, match="choose device and dtype before"):
            model.float()
    return "said so"


def test_order_matters_and_is_said(run_on_ranks):
    assert run_on_ranks(too_soon_and_too_late, 1) == ["said so"]


@pytest.mark.parametrize(
    ("technique", "layout", "message"),
    [
        (
            "ddp",
            Layout(dp_shard=2, tp=2),
            "zero1",
        ),
        ("ddp", Layout(dp_shard=2, pp=2, ep=2), "zero1"),
        (
            "zero1",
            Layout(dp_replicate=2, dp_shard=1, tp=2),
            "dp_replicate 2",
        ),
        ("zero1", Layout(dp_replicate=2, dp_shard=2), "dp_replicate 2 and dp_shard 2"),
        ("hsdp", Layout(dp_shard=4), "dp4"),
    ],
)
def test_refused(technique, layout, message):
    with pytest.raises(LayoutError, match=message):
        check_data_parallel(technique, layout)
    check_data_parallel("fsdp", layout)


def test_no_such_technique():
    with pytest.raises(ConfigError, match="data_parallel 'zero4'"):
        check_data_parallel("zero4", Layout())


def on_mps(rank, technique):
    with patch.object(anywhere, "build_mesh", lambda layout, _: build_mesh(layout, "mps")):
        return anywhere.train(rank, Layout(dp_shard=1), {"data_parallel": technique})


@pytest.mark.parametrize("technique", ["fsdp", "ddp"])
def test_on_mps_the_model_stays_as_it_is(run_on_ranks, technique):
    """PyTorch makes no mesh and no streams there. Here the tensors are the CPU's."""
    anywhere.assert_same(run_on_ranks(on_mps, 1, technique), reference.train("sgd", torch.float64, 2))


def test_no_offload_on_mps():
    mesh = Mesh(Layout(dp_shard=1), None, no_data_parallel=True)
    with pytest.raises(ConfigError, match="offload on mps"):
        apply_data_parallel(nn.Linear(1, 1), mesh, cnn_plan(), FP64, Techniques(offload=True))


class Net(nn.Module):
    """The widths of the branches differ, so that collectives which pair others' are no mere wrong numbers."""

    def __init__(self):
        super().__init__()
        self.common = nn.Linear(6, 8)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(8, 2)
        self.left = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        h = self.common(x)
        first = x[:, 0] < 0
        out = h.clone()
        turns = [(self.left, first), (self.right, ~first)]
        # Ranks may even use the branches in another order.
        for branch, pick in turns if x[0, 1] > 0 else turns[::-1]:
            if pick.any():
                out[pick] = out[pick] + branch(h[pick])
        return self.head(out)


def batches():
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        x[:4, 0] = -x[:4, 0].abs()
        # In every other step the ranks use the same.
        x[4:, 0] = x[4:, 0].abs() * (-1) ** step
        yield x


def trained(rank, technique, ranks, micro):
    """Steps of AdamW: how far each step's gradients are, and the weights in the end."""
    model = build(Net, Layout(dp_shard=ranks), data_parallel=technique)
    net = plain(model, Net)
    off = []
    optimizers = [torch.optim.AdamW(either.parameters(), lr=0.05) for either in (model, net)]
    for x in batches():
        x, shard = x.requires_grad_(), own(x, rank.rank, ranks).requires_grad_()
        for n, some in enumerate(shard.chunk(micro)):
            sync_gradients(model, n == micro - 1)
            model(some).square().sum().backward()
        net(x).square().sum().backward()
        for parameter in net.parameters():
            # What no sample uses counts as zero.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert all(parameter.grad is not None for parameter in model.parameters())
        off.append(furthest(gradients(model), gradients(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            off.append((model(shard) - own(net(x), rank.rank, ranks)).abs().max().item())
    return [*off, furthest(parameters(model), parameters(net))]


@pytest.mark.parametrize(
    ("technique", "ranks", "micro"),
    [
        ("ddp", 2, 1),
        ("zero2", 2, 2),
        pytest.param("zero1", 4, 1, marks=pytest.mark.long),
        pytest.param("ddp", 4, 2, marks=pytest.mark.long),
    ],
)
def test_unused_parameters_count_as_zero(run_on_ranks, technique, ranks, micro):
    for off in run_on_ranks(trained, ranks, technique, ranks, micro):
        assert max(off) < 1e-12, off
