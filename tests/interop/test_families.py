"""Random weights of each family that is read, in `transformers` and here, and back."""

import pytest
import torch

from mmm.weights.hugging_face import export, known_model
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm.weights.weights import config_of

pytestmark = pytest.mark.interop

# A small model that each family of transformers can build.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
}
# How Llama 3.1 stretches its rotary angles.
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 20_000.0,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": 7}),
        ("Mistral", {"sliding_window": None, "head_dim": 16}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"max_position_embeddings": 256, "rope_scaling": LLAMA_3}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(transformers, tmp_path, kind, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # They start as 1, or 0.
            if "norm" in name or "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")

    weights = open_weights(tmp_path / "hf")
    model = weights.definition.build(config_of(weights))
    state = {name: weights.read_full(name) for name in weights.entries}
    model.load_state_dict(state, strict=not model.config.tie_word_embeddings)
    tokens = torch.randint(config.vocab_size, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)

    write_own(weights, tmp_path / "own")
    export(open_weights(tmp_path / "own"), tmp_path / "back", None, 10**9, print)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_defaults_are_those_of_the_class_in_transformers(transformers, kind):
    """A config.json that has only the sizes that must be there is read as transformers reads it."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    sizes |= {"hidden_size": 256, "num_attention_heads": 64}
    config = {"model_type": kind.lower(), **sizes}
    _, names, full = known_model(config, "config.json")
    read = names.read(full, "config.json")
    theirs = getattr(transformers, f"{kind}Config")(**sizes)
    assert read["n_kv_heads"] == theirs.num_key_value_heads
    assert read["norm_eps"] == theirs.rms_norm_eps
    assert read["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert read["tie_word_embeddings"] == theirs.tie_word_embeddings
    assert read.get("window") == getattr(theirs, "sliding_window", None)
    head_dim = read.get("head_dim") or read.get("head_width") or 4
    assert head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert full["max_position_embeddings"] == theirs.max_position_embeddings
    assert full.get("eos_token_id") == theirs.eos_token_id


def test_a_mistral_with_full_attention_in_each_layer(transformers, tmp_path):
    """transformers takes it for a Ministral, whose window is only in sliding layers."""
    config = transformers.MinistralConfig(**SIZES, sliding_window=7, layer_types=["full_attention"] * 2, head_dim=8)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"ministral"', '"mistral"'))
    weights = open_weights(tmp_path / "hf")
    model = weights.definition.build(config_of(weights))
    model.load_state_dict({name: weights.read_full(name) for name in weights.entries})
    tokens = torch.randint(config.vocab_size, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
