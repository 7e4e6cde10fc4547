"""What is compiled gives the same gradients, or is refused."""

import os
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, loss_parallel

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Techniques
from mmm.models.gpt.model import GPT, GPTConfig
from mmm.models.gpt.plan import gpt_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.nn.init import canonical_name
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.parallel.compile import CompileReport, check_compile, compile_modules
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan
from mmm.runtime.log import get_logger
from support import reference, vision
from support.compiling import without_code
from support.own_model import FP64

# Two layers, without and with experts.
CONFIG = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)
WITH_EXPERTS = replace(CONFIG, n_experts=4, expert_dim=24)

MODELS = {
    "transformer": (lambda: Transformer(CONFIG), transformer_plan),
    "gpt": (lambda: GPT(GPTConfig(dim=32, n_layers=2, n_heads=4, vocab_size=256, block_size=32)), gpt_plan),
    "experts": (lambda: Transformer(WITH_EXPERTS), transformer_plan),
    "vit": (lambda: vision.build("vit"), vit_plan),
}


def batch_of(name, step):
    """Inputs and targets of a global batch."""
    if name == "vit":
        return vision.batch("vit", step)
    batch = reference.tokens().batch(step, reference.GLOBAL_BATCH, 0, reference.GLOBAL_BATCH)
    return batch.inputs, batch.targets


def gradients(rank, name, layout, backend):
    """Gradients of two steps of a compiled model, and the graphs that PyTorch has made.

    Args:
        backend: aot_eager is inductor without its C++: minutes less.
    """
    make, plan = MODELS[name]
    torch._dynamo.reset()
    mesh = build_mesh(layout, "cpu", experts=name == "experts")
    with torch.device("meta"):
        model = make()
    with without_code() if backend == "aot_eager" else nullcontext():
        model = parallelize(model, mesh, plan(), FP64, compile=True)
    materialize(model, torch.device("cpu"), reference.SEED)
    steps = []
    for step in range(2):
        inputs, targets = batch_of(name, step)
        count = targets.numel()
        # This rank's samples.
        inputs, targets = (tensor.chunk(layout.dp)[layout.dp_coordinate(rank.rank)] for tensor in (inputs, targets))
        with loss_parallel():
            cross_entropy(model(inputs), targets, count).backward()
        steps.append({canonical_name(name): full(p.grad).clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return steps, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def full(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def expected_gradients(name):
    """The same of plain PyTorch on one process."""
    model = MODELS[name][0]().double()
    weights.initialize(model, reference.SEED)
    steps = []
    for step in range(2):
        inputs, targets = batch_of(name, step)
        logits = model(inputs)
        # (tokens, vocabulary), or (images, classes).
        nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return steps


def wrong_gradients(steps, expected):
    """Names of the parameters whose gradient is wrong in some step."""
    wrong = set()
    for got, right in zip(steps, expected, strict=True):
        assert set(got) == set(right)
        for name, gradient in right.items():
            if not (got[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max():
                wrong.add(name)
    return wrong


TP2 = Layout(dp_shard=1, tp=2)


class Layer(nn.Module):
    """Compiled as a whole, as the layers of models are: PyTorch compiles nothing of a module that is its own, such as
    a Linear."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(4, 4)

    def forward(self, x):
        return self.matrix(x).sin()


def embedding_gradient(rank):
    """Gradient of an embedding with sharded rows, whose output enters a compiled layer: compiled, and not compiled."""
    styles = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1.matrix": SequenceParallel(use_local_output=True),
    }
    gradients = []
    for compiled in (True, False):
        with without_code():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(8, 4), Layer())
            plan = Plan(styles, fsdp_units=(), compiled=("1",))
            model = parallelize(model, build_mesh(TP2, "cpu"), plan, FP64, compile=compiled)
        materialize(model, torch.device("cpu"), 0)
        model(torch.arange(8).view(1, 8)).square().sum().backward()
        gradients.append(model[0].weight.grad.full_tensor())
    return gradients


def test_an_input_that_is_still_on_its_way(run_on_ranks):
    for compiled, right in run_on_ranks(embedding_gradient, 2):
        assert right.abs().max() > 0
        assert (compiled - right).abs().max() <= 1e-12 * right.abs().max()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [("transformer", TP2), ("gpt", TP2), ("experts", TP2), ("vit", TP2), ("transformer", Layout(dp_shard=2, tp=2))],
)
def test_compiled_with_tp(run_on_ranks, name, layout):
    expected = expected_gradients(name)
    for steps, graphs in run_on_ranks(gradients, layout.ranks, name, layout, "aot_eager"):
        assert graphs >= 1
        assert wrong_gradients(steps, expected) == set()


@pytest.mark.long
def test_compiled_to_code_with_tp(run_on_ranks, tmp_path, monkeypatch):
    """The second time, code and graphs come from the cache on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = expected_gradients("transformer")
    for _ in range(2):
        for steps, graphs in run_on_ranks(gradients, 2, "transformer", TP2, "inductor", timeout=900):
            assert graphs >= 1
            assert wrong_gradients(steps, expected) == set()


class Gathered(nn.Module):
    """Gathers its sharded weight. Backward takes this rank's rows of the gradient: each rank has a graph of its own."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))

    def forward(self, x):
        return x @ self.weight.redistribute(placements=[Replicate()]).to_local()


def gradients_compiled_twice(rank, cache):
    """A rank's part of a gradient: not compiled, compiled, and compiled again with what is in the cache on disk."""
    mesh = build_mesh(TP2, "cpu")["tp"]
    gradients = []
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        for is_compiled in (False, True, True):
            torch._dynamo.reset()
            model = nn.Sequential(Gathered(mesh))
            if is_compiled:
                compile_modules(model, Plan({}, fsdp_units=(), compiled=("0",)), TP2)
            model(torch.arange(8.0).view(2, 4)).square().sum().backward()
            gradients.append(model[0].weight.grad.to_local())
            # Both ranks' graphs are on disk before one is read again.
            torch.distributed.barrier()
    return gradients


@pytest.mark.long
def test_a_rank_takes_no_other_ranks_graph_from_the_cache(run_on_ranks, tmp_path):
    for right, *compiled in run_on_ranks(gradients_compiled_twice, 2, str(tmp_path)):
        assert right.abs().max() > 0
        for gradient in compiled:
            torch.testing.assert_close(gradient, right)


def dtensor_into_a_compiled_module(rank):
    model = nn.Sequential(nn.LayerNorm(4), Layer())
    # A norm of local tokens that returns a DTensor.
    plan = Plan({"0": SequenceParallel(), "1.matrix": SequenceParallel()}, fsdp_units=(), compiled=("1",))
    model = parallelize(model, build_mesh(TP2, "cpu"), plan, FP64, compile=True)
    materialize(model, torch.device("cpu"), 0)
    with pytest.raises(LayoutError, match=r"the module 1 takes or returns a DTensor \(1, 4, 4\)"):
        model(torch.zeros(1, 2, 4, dtype=torch.float64))


def test_dtensors_are_refused(run_on_ranks):
    run_on_ranks(dtensor_into_a_compiled_module, 2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_with_tp_is_refused(mode):
    with pytest.raises(LayoutError, match=rf"compile with tp 2 and activation checkpointing '{mode}'"):
        check_compile(TP2, mode)
    check_compile(Layout(dp_shard=2), mode)
    check_compile(TP2, "none")


ONE = Layout(dp_shard=1)
TWO = Layout(dp_shard=2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_experts_are_refused(mode):
    with torch.device("meta"):
        model = Transformer(WITH_EXPERTS)
        sample = torch.zeros(2, 16, dtype=torch.int64)
    for layout in (ONE, Layout(pp=2, dp_shard=1)):
        with pytest.raises(ConfigError, match=rf"'{mode}'"):
            partition_model(model, transformer_plan(), layout, Techniques(compile=True, checkpointing=mode), sample)


def test_nothing_compiled_is_said(caplog):
    """A module that PyTorch gives up on: it runs, and a warning says that it is not compiled."""
    torch._dynamo.reset()
    module = nn.Linear(2, 2)
    module.forward = torch.compiler.disable(module.forward)
    module.compile(backend="eager")
    report = CompileReport([module])
    module(torch.zeros(1, 2))
    with caplog.at_level("WARNING", logger=get_logger().name):
        report.log()
    assert "compiled none of the 1 modules" in caplog.text
