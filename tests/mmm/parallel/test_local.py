"""Weights that a model's own rules draw, for a model on the meta device."""

from dataclasses import replace

import pytest
import torch

from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn import weights
from mmm.parallel import draw_weights

CPU = torch.device("cpu")
CONFIG = TransformerConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=24)


@pytest.mark.parametrize("changed", [{}, {"n_experts": 3}, {"tie_word_embeddings": True}])
def test_drawn_as_on_one_device(changed):
    config = replace(CONFIG, **changed)
    with torch.device("meta"):
        model = Transformer(config)
    draw_weights(model, CPU, 3)
    expected = Transformer(config)
    weights.initialize(expected, 3)
    state = model.state_dict()
    names = expected.state_dict()
    assert state.keys() == names.keys()
    for name, tensor in names.items():
        assert torch.equal(state[name], tensor)
