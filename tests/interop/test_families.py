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
# GPT-2 has its own words for them.
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 40, "vocab_size": 101}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
# How Llama 3.1 stretches its rotary angles.
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 20_000.0,
}


def sizes_of(kind):
    return GPT2 if kind == "GPT2" else SIZES


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
        ("Mixtral", {"num_local_experts": 6}),
        ("Mixtral", {"num_local_experts": 6, "sliding_window": 7}),
        ("Qwen3Moe", MIXTURE),
        ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
        ("GPT2", {"activation_function": "gelu_new"}),
        ("GPT2", {"activation_function": "gelu"}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(transformers, tmp_path, kind, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes_of(kind), **changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # They start as 1, or 0.
            if "norm" in name or "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")

    weights = open_weights(tmp_path / "hf")
    model = weights.definition.build(config_of(weights)).eval()
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


# What the config.json of Qwen3-30B-A3B says, where it is not the default.
QWEN3_30B = {"num_hidden_layers": 48, "norm_topk_prob": True, "head_dim": 128, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("kind", "changes", "preset"),
    [("Mixtral", {}, "mixtral-8x7b"), ("Qwen3Moe", QWEN3_30B, "30b-a3b")],
)
def test_a_preset_has_the_sizes_of_a_published_model(transformers, kind, changes, preset):
    """A wrong base of the rotary angles, or another router, would show in no number of parameters."""
    config = {**getattr(transformers, f"{kind}Config")(**changes).to_dict(), **changes}
    definition, names, config = known_model(config, kind)
    assert definition.config(**names.read(config, kind)) == definition.presets[preset]


@pytest.mark.parametrize(
    ("kind", "changes", "most"),
    [
        ("GPT2", {}, 1e-12),
        # transformers computes norms and the router's softmax in float32.
        ("Mixtral", {"num_local_experts": 6}, 1e-5),
        ("Qwen3Moe", MIXTURE, 1e-5),
        ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}, 1e-5),
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers(transformers, tmp_path, kind, changes, most):
    """In float64. Written and read like weights, its gradients have our names and order; experts are one tensor there,
    too, while it trains."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes_of(kind), **changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")
    weights = open_weights(tmp_path / "hf")
    ours = weights.definition.build(config_of(weights)).double().eval()
    ours.load_state_dict({name: weights.read_full(name) for name in weights.entries}, strict=kind != "GPT2")
    tokens = torch.randint(config.vocab_size, (2, 24))
    computed, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(computed, expected, rtol=0, atol=most)
    for logits in (computed, expected):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = open_weights(tmp_path / "gradients")
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name
        torch.testing.assert_close(parameter.grad, gradients.read_full(name), rtol=0, atol=most)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_defaults_are_those_of_the_class_in_transformers(transformers, kind):
    """A config.json that has only the sizes that must be there is read as transformers reads it."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    sizes |= {"hidden_size": 256, "num_attention_heads": 64}
    theirs = getattr(transformers, f"{kind}Config")(**sizes)
    config = {"model_type": theirs.model_type, **sizes}
    _, names, full = known_model(config, "config.json")
    read = names.read(full, "config.json")
    mixture = {"n_experts": "num_local_experts", "top_k": "num_experts_per_tok", "expert_dim": "moe_intermediate_size"}
    for field, key in mixture.items():
        assert read.get(field) == getattr(theirs, key, None)
    assert read["n_kv_heads"] == theirs.num_key_value_heads
    assert read["norm_eps"] == theirs.rms_norm_eps
    assert read["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert read["tie_word_embeddings"] == theirs.tie_word_embeddings
    assert read.get("window") == getattr(theirs, "sliding_window", None)
    head_dim = read.get("head_dim") or read.get("head_width") or 4
    assert head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert full["max_position_embeddings"] == theirs.max_position_embeddings
    assert full.get("eos_token_id") == theirs.eos_token_id


def test_defaults_of_a_gpt2(transformers):
    theirs = transformers.GPT2Config(**GPT2)
    _, names, full = known_model({"model_type": "gpt2", **GPT2}, "config.json")
    read = names.read(full, "config.json")
    assert (read["dropout"], read["attention_dropout"]) == (theirs.resid_pdrop, theirs.attn_pdrop)
    assert (read["norm_eps"], full["eos_token_id"]) == (theirs.layer_norm_epsilon, theirs.eos_token_id)
    assert read["tanh_gelu"] == (theirs.activation_function == "gelu_new")


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
