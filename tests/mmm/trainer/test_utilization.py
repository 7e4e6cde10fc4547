"""FLOPs of a step against the formula, and whose peak they are divided by."""

import pytest
import torch

from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import meta_parameters
from mmm.run.hooks.utilization import peak_flops, step_flops


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_flops_are_those_of_the_formula(samples, tied):
    """6 a weight and token, and 12 · layers · dim · seq² for scores and their product with the values."""
    config = TransformerConfig(
        dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, tie_word_embeddings=tied
    )
    with meta_parameters():
        model = Transformer(config)
    seq = 16
    weights = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 64
    inputs = torch.zeros(samples, seq, dtype=torch.int64, device="meta")
    assert step_flops(model, transformer_plan(), inputs) == 6 * weights * seq + 12 * 3 * 32 * seq**2


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 19.5e12),
    ],
)
def test_peaks_of_known_devices(monkeypatch, name, dtype, peak):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    found, source = peak_flops(torch.device("cuda", 0), dtype)
    assert found == peak
    assert source.startswith(f"{name}: table, ")
