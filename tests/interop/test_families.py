"""Random weights of each family that is read, in `transformers` and here, and back."""

import pytest
import torch

from mmm.generate import config_of
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own

pytestmark = pytest.mark.interop

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": 7}),
        ("Mistral", {"sliding_window": None, "head_dim": 16}),
        ("Llama", {}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(transformers, tmp_path, kind, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "bias" in name:  # they start as 1, or 0
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")

    weights = open_weights(tmp_path / "hf")
    model = weights.definition.build(config_of(weights))
    state = {name: weights.read(name, (0,) * len(entry.shape), entry.shape) for name, entry in weights.entries.items()}
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
