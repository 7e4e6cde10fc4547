"""Image models under every technique: losses, gradient norms and every gradient as in plain PyTorch on one process."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import loss_parallel

from mmm.models.draw import canonical_name
from mmm.parallel import Layout, apply, build_mesh, clip_grad_norm, cross_entropy, materialize
from mmm.parallel.local import detached
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import vision

CPU = torch.device("cpu")
PLANS = {"cnn": cnn_plan, "vit": vit_plan}


def build(model: str, layout: Layout, technique: str, compile: bool = False) -> nn.Module:
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        net = vision.build(model)
    precision = Precision("fp64", torch.float64, torch.float64)
    net = apply(net, mesh, PLANS[model](), precision, data_parallel=technique, compile=compile)
    materialize(net, CPU, vision.SEED)
    return net


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients, by name."""
    found = {canonical_name(name): p.grad for name, p in net.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def train_one(rank, model: str, layout: Layout, technique: str, optimizer: str, steps: int):
    net = build(model, layout, technique)
    step_of = vision.optimizer_of(optimizer, net.parameters())
    size = vision.GLOBAL_BATCH // layout.dp
    mine = layout.dp_coordinate(rank.rank) * size
    losses, norms, first = [], [], {}
    for step in range(steps):
        images, classes = (whole[mine : mine + size] for whole in vision.batch(model, step))
        with loss_parallel():
            loss = cross_entropy(net(images), classes, vision.GLOBAL_BATCH)
            loss.backward()
        if step == 0:
            first = gradients(net)
        norms.append(clip_grad_norm(net.parameters(), vision.MAX_NORM[model]).item())
        step_of.step()
        step_of.zero_grad()
        shares = gather_floats([detached(loss).item()], CPU)
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    return losses, norms, first


def train(rank, model: str, layout: Layout, technique: str, steps: dict[str, int]):
    """Results by optimizer, of so many steps each."""
    return {name: train_one(rank, model, layout, technique, name, count) for name, count in steps.items()}


def assert_same(model: str, results: list) -> None:
    """Each rank's results by optimizer, against the reference."""
    for got in results:
        for optimizer, (losses, norms, first) in got.items():
            expected_losses, expected_norms, expected_first = vision.train(model, optimizer)
            assert first.keys() == expected_first.keys()
            for name, gradient in expected_first.items():
                off = ((first[name] - gradient).abs().max() / gradient.abs().max()).item()
                assert off <= 1e-8, f"gradient of {name} differs by {off:.2e} of its largest element"
            for what, values, expected, bound in (
                ("losses", losses, expected_losses, 1e-9),
                ("norms", norms, expected_norms, 1e-9),
            ):
                worst = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=False))
                assert worst <= bound, f"{optimizer}: {what} differ by {worst:.2e}: {values} instead of {expected}"
            assert abs(norms[0] - expected_norms[0]) <= 1e-12 * expected_norms[0]


CASES = [(Layout(dp_shard=2, tp=2), "fsdp")]
MORE = [
    *[(Layout(dp_shard=4), technique) for technique in ("ddp", "zero1", "zero2", "fsdp")],
    (Layout(dp_replicate=2, dp_shard=2), "hsdp"),
    *[(Layout(dp_shard=1), technique) for technique in ("ddp", "zero2", "fsdp")],
    *[(Layout(dp_shard=2), technique) for technique in ("ddp", "zero1", "zero2", "fsdp")],
    *[(Layout(dp_shard=3), technique) for technique in ("ddp", "zero1", "zero2", "zero3")],
    (Layout(dp_replicate=4, dp_shard=1), "ddp"),
    (Layout(dp_shard=1, tp=2), "fsdp"),
    (Layout(dp_shard=1, tp=4), "fsdp"),
]


@pytest.mark.parametrize("model", ["cnn", pytest.param("vit", marks=pytest.mark.long)])
@pytest.mark.parametrize(("layout", "technique"), CASES, ids=str)
def test_float64(run_on_ranks, model, layout, technique):
    assert_same(model, run_on_ranks(train, layout.ranks, model, layout, technique, {"sgd": vision.STEPS, "adamw": 5}))


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "vit"])
@pytest.mark.parametrize(("layout", "technique"), MORE, ids=str)
def test_float64_on_more_meshes(run_on_ranks, model, layout, technique):
    """Fewer steps, and SGD alone; 3 ranks divide hardly any dim of a parameter."""
    assert_same(model, run_on_ranks(train, layout.ranks, model, layout, technique, {"sgd": 3}))


def planted(rank, where: str, wrong, model: str, layout: Layout, technique: str):
    """Train with one function of the package replaced by a wrong one."""
    module, *path = where.split(" ")
    owner = importlib.import_module(module)
    for name in path[:-1]:
        owner = getattr(owner, name)
    right = getattr(owner, path[-1])
    setattr(owner, path[-1], WRONG[wrong])
    try:
        return train(rank, model, layout, technique, {"sgd": 3})
    finally:
        setattr(owner, path[-1], right)


WRONG = {
    "mean instead of sum": lambda self: self.memory.div_(self.ranks),
    "no all-gather": lambda self: None,
    "no sum over ranks": lambda self: own_rows(self),
    "summed over tp": lambda module, output, mesh: output.to_local(grad_placements=[Partial()]),
}


class Done:
    def wait(self):
        pass


def own_rows(shard):
    shard.summed = shard.full.grad[shard.rows]
    return Done()


@pytest.mark.parametrize(
    ("wrong", "where", "layout", "technique"),
    [
        ("mean instead of sum", "mmm.parallel.dp.ddp Bucket finish", Layout(dp_shard=2), "ddp"),
        ("no all-gather", "mmm.parallel.dp.zero Zero gather", Layout(dp_shard=2), "zero1"),
        pytest.param(
            "no all-gather", "mmm.parallel.dp.zero Zero gather", Layout(dp_shard=2), "zero2", marks=pytest.mark.long
        ),
        pytest.param(
            "no sum over ranks",
            "mmm.parallel.dp.zero ShardedParameter begin",
            Layout(dp_shard=2),
            "zero2",
            marks=pytest.mark.long,
        ),
        ("summed over tp", "mmm.parallel.tp.replicated _leave", Layout(dp_shard=1, tp=2), "fsdp"),
    ],
)
def test_planted_bugs_are_caught(run_on_ranks, wrong, where, layout, technique):
    results = run_on_ranks(planted, layout.ranks, where, wrong, "vit", layout, technique)
    with pytest.raises(AssertionError, match="differ"):
        assert_same("vit", results)


def compiled_gradients(rank, layout: Layout):
    """Two backwards of a compiled ViT. aot_eager is inductor without its C++: half a minute less."""
    torch._dynamo.reset()
    original = nn.Module.compile
    nn.Module.compile = lambda self, **_: original(self, backend="aot_eager")
    try:
        net = build("vit", layout, "fsdp", compile=True)
    finally:
        nn.Module.compile = original
    found = []
    for _ in range(2):
        net.zero_grad()
        images, classes = vision.batch("vit", 0)
        cross_entropy(net(images), classes, vision.GLOBAL_BATCH).backward()
        found.append(gradients(net))
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_compiled_with_tp(run_on_ranks):
    """What is compiled takes and gives plain tensors: a `DTensor` there has silently wrong gradients."""
    _, _, expected = vision.train("vit", "sgd")
    for found, graphs in run_on_ranks(compiled_gradients, 2, Layout(dp_shard=1, tp=2)):
        assert graphs >= 1
        for got in found:
            for name, gradient in expected.items():
                assert (got[name] - gradient).abs().max() <= 1e-8 * gradient.abs().max(), name
