"""What is compiled gives the same gradients, or is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.nn.draw import canonical_name
from mmm.parallel import Layout, apply, build_mesh, check_compile, cross_entropy, materialize
from mmm.parallel.compile import CompileReport
from mmm.parallel.partition import partition_model
from mmm.runtime.device import Precision
from mmm.runtime.log import get_logger
from support import reference, vision

FP64 = Precision("fp64", torch.float64, torch.float64)
CONFIG = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)


def gradients(rank, layout, backend):
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        model = Transformer(CONFIG)
    torch._dynamo.reset()
    compiled = []
    original = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **_: (compiled.append(type(self).__name__), original(self, backend=backend))
    try:
        apply(model, mesh, transformer_plan(), FP64, compile=True)
    finally:
        torch.nn.Module.compile = original
    materialize(model, torch.device("cpu"), reference.SEED)
    size = reference.GLOBAL_BATCH // layout.dp
    batch = reference.tokens().batch(0, reference.GLOBAL_BATCH, layout.dp_coordinate(rank.rank) * size, size)
    with loss_parallel():
        cross_entropy(model(batch.inputs), batch.targets, batch.count).backward()
    grads = {canonical_name(name): p.grad.full_tensor() for name, p in model.named_parameters()}
    return compiled, grads, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled_gradients(rank, layout: Layout):
    """Two backwards of a compiled ViT. aot_eager is inductor without its C++: half a minute less."""
    torch._dynamo.reset()
    original = nn.Module.compile
    nn.Module.compile = lambda self, **_: original(self, backend="aot_eager")
    try:
        with torch.device("meta"):
            net = vision.build("vit")
        net = apply(net, build_mesh(layout, "cpu"), vit_plan(), FP64, compile=True)
    finally:
        nn.Module.compile = original
    materialize(net, torch.device("cpu"), vision.SEED)
    found = []
    for _ in range(2):
        net.zero_grad()
        images, classes = vision.batch("vit", 0)
        cross_entropy(net(images), classes, vision.GLOBAL_BATCH).backward()
        found.append({canonical_name(name): p.grad.full_tensor().clone() for name, p in net.named_parameters()})
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_compiled_with_tp(run_on_ranks):
    """What is compiled takes and gives plain tensors: a `DTensor` there has silently wrong gradients."""
    expected = vision.gradients("vit")
    for found, graphs in run_on_ranks(compiled_gradients, 2, Layout(dp_shard=1, tp=2)):
        assert graphs >= 1
        for got in found:
            for name, gradient in expected.items():
                assert (got[name] - gradient).abs().max() <= 1e-8 * gradient.abs().max(), name


def test_refused_with_tp():
    with pytest.raises(LayoutError, match=r"compile with tp 2: .* silently wrong gradients"):
        check_compile(transformer_plan(), Layout(dp_shard=1, tp=2))
    check_compile(transformer_plan(), Layout(dp_shard=2))
    check_compile(vit_plan(), Layout(dp_shard=1, tp=2))


WITH_EXPERTS = replace(CONFIG, n_experts=4, expert_dim=24)


ONE, TWO = Layout(dp_shard=1), Layout(dp_shard=2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_experts_are_refused(mode):
    with torch.device("meta"):
        model, sample = Transformer(WITH_EXPERTS), torch.zeros(2, 16, dtype=torch.int64)
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
