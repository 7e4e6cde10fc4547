"""Keys of a config.json beyond the usual ones: passed over by name, or refused; and their values."""

import pytest

from mmm.errors import CheckpointError
from mmm.generate import config_of
from mmm.nn.rope import RopeScaling
from mmm.weights.open_weights import open_weights
from support.llamas import CONFIG, write_hugging_face

LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config is {'quant_method': 'gptq'}",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention']",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"per_layer_config": {"0": {"mlp_bias": True}}}, "per_layer_config is {'0'"),
        ({"newRopeKind": False}, "newRopeKind"),
        ({"num_new_experts": 8}, "unknown key num_new_experts (8)"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA_3, "rope_theta": 5.0}}, "something else than rope_theta"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA_3, "rope_theta": "5"}},
            "rope_theta is '5'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA_3}, "original_max_position_embeddings": 64},
            "original_max_position_embeddings is 64",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_changes_the_computation(tmp_path, keys, words):
    with pytest.raises(CheckpointError) as refused:
        open_weights(write_hugging_face(tmp_path / "a", {**CONFIG, **keys}))
    assert words in str(refused.value)


@pytest.mark.parametrize("inside", [{"rope_theta": 10_000.0}, {}], ids=["theta inside", "theta outside"])
def test_a_scaling_with_all_that_it_takes(tmp_path, inside):
    """The length may stand outside too, where transformers looks first."""
    keys = {"rope_scaling": {"rope_type": "llama3", **LLAMA_3, **inside}, "original_max_position_embeddings": 32}
    read = open_weights(write_hugging_face(tmp_path / "a", {**CONFIG, **keys}))
    assert config_of(read).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert config_of(read).rope_theta == 10_000
