"""The file that ``--write`` writes has the plan twice: as PyTorch's calls, and as data that `mmm.parallel` takes."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmm.errors import LayoutError
from mmm.parallel import Layout, Plan, Replicated, apply, build_mesh, materialize, meta_parameters
from mmm_verify.propose.code import Axes
from mmm_verify.propose.find import propose
from mmm_verify.subject import make_subject
from support import propose_models as models
from support.own_model import CPU, FP64
from support.propose_models import Decoder, floats, images, tokens

STEPS = 3
MODELS = {
    "decoder": (lambda: Decoder(models.Heads, tie=True), tokens),
    "experts": (lambda: nn.Sequential(models.Experts(), models.Experts()), floats),
    "attention": (models.PyTorchAttention, floats),
    "norms over all heads": (lambda: Decoder(models.NormsOverAll), tokens),
    "convolutions": (models.UNet, images),
}


def written_plan(name, folder):
    """Find a plan, write it, and import the file."""
    model_fn, batch_fn = MODELS[name]
    subject = make_subject(model_fn, None, batch_fn, None, "dp2")
    file = folder / "plan.py"
    file.write_text(propose(subject, name, Axes(("dp",), "tp"), 2).code)
    spec = importlib.util.spec_from_file_location("written_plan", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plan()


def losses_of(model, batch, n_samples):
    """The losses of three steps, each rank's sum divided by the number of elements in the global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, foreach=False)
    losses = []
    for _ in range(STEPS):
        output = model(batch)
        loss = output.square().sum() / (n_samples * output[0].numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def global_batch(batch_fn):
    torch.manual_seed(1)
    batch = batch_fn()
    return batch.double() if batch.is_floating_point() else batch


def on_one_device(name):
    model_fn, batch_fn = MODELS[name]
    torch.manual_seed(0)
    model = model_fn().double()
    batch = global_batch(batch_fn)
    return losses_of(model, batch, len(batch))


def on_ranks(rank, names, folder, layout):
    results = {}
    for name in names:
        model_fn, batch_fn = MODELS[name]
        plan = written_plan(name, folder / str(rank.rank))
        torch.manual_seed(0)
        mesh = build_mesh(layout, "cpu")
        with meta_parameters():
            model = model_fn()
        model = apply(model, mesh, plan, FP64)
        materialize(model, CPU, 0)
        batch = global_batch(batch_fn)
        n_own = len(batch) // layout.dp
        first = layout.dp_coordinate(rank.rank) * n_own
        losses = losses_of(model, batch[first : first + n_own], len(batch))
        dist.all_reduce(losses, group=mesh["dp_shard"].get_group())
        results[name] = losses
    return results


def check(run_on_ranks, tmp_path, names, layout):
    for rank in range(layout.ranks):
        (tmp_path / str(rank)).mkdir()
    for results in run_on_ranks(on_ranks, layout.ranks, names, tmp_path, layout):
        for name in names:
            expected = on_one_device(name)
            assert torch.allclose(results[name], expected, rtol=1e-12, atol=0), (name, results[name], expected)


def test_the_same_losses(run_on_ranks, tmp_path):
    check(run_on_ranks, tmp_path, ["decoder"], Layout(dp_shard=1, tp=2))


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(dp_shard=1, tp=2), Layout(dp_shard=2, tp=2)], ids=["tp2", "dp2·tp2"])
def test_the_same_losses_of_all_kinds(run_on_ranks, tmp_path, layout):
    check(run_on_ranks, tmp_path, list(MODELS), layout)


def refusal(rank, plan):
    """What is said of a plan for two ranks."""
    mesh = build_mesh(Layout(dp_shard=1, tp=2), "cpu")
    with meta_parameters():
        model = Decoder(models.Heads)
    with pytest.raises(LayoutError) as caught:
        apply(model, mesh, plan, FP64)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan({}, fsdp_units=()), "no style for"),
        (Plan({}, fsdp_units=(), rest=nn.Identity()), "`rest` is Identity()"),
    ],
    ids=["without rest", "a module"],
)
def test_what_is_no_plan_is_refused(run_on_ranks, plan, says):
    for text in run_on_ranks(refusal, 2, plan):
        assert says in text


def replicated(rank):
    """The losses under a plan without any style for matrices."""
    torch.manual_seed(0)
    mesh = build_mesh(Layout(dp_shard=1, tp=2), "cpu")
    with meta_parameters():
        model = MODELS["decoder"][0]()
    model = apply(model, mesh, Plan({}, fsdp_units=(), rest=Replicated()), FP64)
    materialize(model, CPU, 0)
    batch = global_batch(tokens)
    return losses_of(model, batch, len(batch))


def test_the_rest_is_replicated(run_on_ranks):
    expected = on_one_device("decoder")
    for losses in run_on_ranks(replicated, 2):
        assert torch.allclose(losses, expected, rtol=1e-12, atol=0)
