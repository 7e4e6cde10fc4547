"""What the package knows of its models: by name, by sizes, by the names of fields; presets and what changes them."""

from dataclasses import asdict, replace

import pytest
import torch

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Layout
from mmm.models.definition import NAMES, check_sizes, find, lookup, of_config, of_fields, of_model_type
from mmm.models.llama.model import PRESETS
from mmm.nn.attention import Documents, causal_attention


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_known_by_its_sizes(name):
    definition = find(name)
    for sizes in (*definition.presets.values(), *definition.small.values()):
        assert not sizes.problems()
        assert of_config(sizes) is definition
    if definition.language:
        assert of_fields(asdict(next(iter(definition.presets.values())))) is definition
    if definition.names is not None:
        assert all(of_model_type(kind) is definition for kind in definition.names.model_types)


@pytest.mark.parametrize("name", [name for name in NAMES if find(name).language])
def test_every_tensor_has_a_name_elsewhere(name):
    definition = find(name)
    if definition.names is None:
        pytest.skip("nobody else has it")
    for sizes in definition.small.values():
        if sizes.n_experts:
            continue
        model, _ = definition.on_meta(sizes, 1, 8)
        others = [definition.names.there(own) for own, _ in model.named_parameters()]
        assert len(set(others)) == len(others)


def test_what_is_no_model():
    assert lookup(object()) is None
    assert of_model_type("gemma") is None
    with pytest.raises(ConfigError, match="mlp"):
        find("mlp")


def test_a_preset_and_what_changes_it():
    qwen3 = find("qwen3")
    sizes = qwen3.sizes("debug", 32, dim=48, vocab_size=None)
    assert (sizes.dim, sizes.hidden_dim, sizes.vocab_size) == (48, 144, 256)
    assert find("gpt").sizes("shakespeare", 32).block_size == 32
    with pytest.raises(ConfigError, match="n_experts 8"):
        find("gpt").sizes("gpt2", n_experts=8)
    with pytest.raises(ConfigError, match="preset llama-8b"):
        qwen3.sizes("llama-8b")


@pytest.mark.parametrize(
    ("name", "preset", "experts", "top_k"),
    [("qwen3", "30b-a3b", 64, 8), ("qwen3", "30b-a3b", 4, 4), ("llama", "debug", 8, 2), ("llama", "debug", 1, 1)],
)
def test_a_token_keeps_its_number_of_experts(name, preset, experts, top_k):
    """Another number of experts had set the 8 of each token back to 2, without a word."""
    assert find(name).sizes(preset, n_experts=experts).top_k == top_k
    assert find(name).sizes(preset, n_experts=experts, top_k=3).top_k == 3


def test_a_window_does_not_go_onto_cp():
    sizes = replace(PRESETS["debug"], window=16)
    with pytest.raises(LayoutError, match="window 16 with seq_length 32 and cp 2"):
        check_sizes(sizes, Layout(dp_shard=1, cp=2), 32)
    check_sizes(sizes, Layout(dp_shard=1, cp=2), 16)


@pytest.mark.parametrize("documents", [False, True])
def test_a_token_sees_its_window(documents):
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    starts = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 4]).expand(2, -1)
    out = causal_attention(q, k, v, Documents.of(starts) if documents else None, window=3)
    for place in range(9):
        first = max(place - 2, 4 if documents and place >= 4 else 0)
        seen = slice(first, place + 1)
        alone = causal_attention(q[:, :, seen], k[:, :, seen], v[:, :, seen])
        torch.testing.assert_close(out[:, :, place], alone[:, :, -1])
