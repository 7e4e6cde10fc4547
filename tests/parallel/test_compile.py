"""What is compiled gives the same gradients, or is refused."""

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import LayoutError
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.models.weights import canonical_name
from mmm.parallel import Layout, apply, build_mesh, check_compile, cross_entropy, materialize
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.runtime.device import Precision
from support import reference

CONFIG = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)


def gradients(rank, layout, backend):
    mesh = build_mesh(layout, "cpu", 60)
    with torch.device("meta"):
        model = Transformer(CONFIG)
    torch._dynamo.reset()
    compiled = []
    original = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **_: (compiled.append(type(self).__name__), original(self, backend=backend))
    try:
        apply(model, mesh, transformer_plan(), Precision("fp64", torch.float64, torch.float64), compile=True)
    finally:
        torch.nn.Module.compile = original
    materialize(model, torch.device("cpu"), reference.SEED)
    size = reference.GLOBAL_BATCH // layout.dp
    batch = reference.tokens().batch(0, reference.GLOBAL_BATCH, layout.dp_coordinate(rank.rank) * size, size)
    with loss_parallel():
        cross_entropy(model(batch.inputs), batch.targets, batch.count).backward()
    grads = {canonical_name(name): p.grad.full_tensor() for name, p in model.named_parameters()}
    return compiled, grads, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_gradients(pool):
    """Whole blocks over dp. aot_eager is inductor without its C++: half a minute less."""
    _, expected = reference.train("sgd", torch.float64, 1, CONFIG)
    compiled, grads, graphs = pool.run(gradients, 2, Layout(dp_shard=2), "aot_eager", timeout=200)[0]
    assert compiled == ["TransformerBlock"] * 2
    assert graphs >= 1
    for name, gradient in expected.items():
        off = (grads[name] - gradient).abs().max() / gradient.abs().max()
        assert off <= 1e-8, f"{name}: {off:.1e}"


def test_refused_with_tp():
    with pytest.raises(LayoutError, match=r"--compile with tp 2: .* silently wrong gradients"):
        check_compile(transformer_plan(), Layout(dp_shard=1, tp=2))
    check_compile(transformer_plan(), Layout(dp_shard=2))
    check_compile(vit_plan(), Layout(dp_shard=1, tp=2))
