"""The GPT by itself: nanoGPT's sizes and initial weights, what it computes, positions and dropout."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmm.models.gpt.model import GPT, PRESETS, GPTConfig
from mmm.nn import init, weights
from mmm.nn.attention import Documents
from mmm.nn.dropout import Dropout, sample_keys

SMALL = GPTConfig(dim=32, n_layers=3, n_heads=4, vocab_size=17, block_size=12, bias=True)
KEYS = sample_keys(1, 2, 0, 2)


def build(config=SMALL, dtype=torch.float64):
    model = GPT(config).to(dtype)
    weights.initialize(model, 0)
    return model


@pytest.fixture
def model():
    return build()


def tokens(batch=2, seq=12):
    return torch.randint(17, (batch, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("preset", "without_positions", "block"),
    [("gpt2", 123_587_328, 1024), ("shakespeare", 10_646_784, 256), ("shakespeare-cpu", 795_904, 64)],
)
def test_numbers_of_parameters_are_those_that_nanogpt_prints(preset, without_positions, block):
    config = PRESETS[preset]
    with torch.device("meta"):
        count = init.parameter_count(GPT(config))
    layer = 12 * config.dim**2 + 2 * config.dim
    assert count - config.position_parameters == without_positions
    assert without_positions == config.n_layers * layer + config.dim * (config.vocab_size + 1)
    assert config.position_parameters == block * config.dim


def test_gpt2_with_biases_is_the_published_one():
    with torch.device("meta"):
        model = GPT(replace(PRESETS["gpt2"], vocab_size=50_257, bias=True))
    assert init.parameter_count(model) == 124_439_808


def test_initial_weights_are_gpt2s():
    config = replace(SMALL, dim=64, n_layers=8)
    for name, parameter in build(config).named_parameters():
        if name.endswith("bias") or "norm" in name:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            residual = name.endswith(("wo.weight", "w2.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_the_first_loss_is_that_of_a_guess():
    model = build(PRESETS["shakespeare-cpu"], torch.float32)
    x = torch.randint(65, (12, 65), generator=torch.Generator().manual_seed(1))
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(65), abs=0.05)


def plain(model, tokens):
    """What it computes, without a mask's kernel, matrices of all heads, or a module of ours."""
    w = dict(model.named_parameters())
    heads, size, seq = SMALL.n_heads, SMALL.head_dim, tokens.shape[1]

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["tok_embeddings.weight"][tokens] + w["pos_embeddings.weight"][:seq]
    for n in range(SMALL.n_layers):
        qkv, outputs = linear(norm(x, f"layers.{n}.attention_norm"), f"layers.{n}.attention.wqkv"), []
        for head in range(heads):
            q, k, v = qkv[..., 3 * size * head : 3 * size * (head + 1)].split(size, dim=-1)
            scores = q @ k.mT / math.sqrt(size) - 1e9 * torch.ones(seq, seq, dtype=x.dtype).triu(1)
            outputs.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(outputs, -1), f"layers.{n}.attention.wo")
        hidden = linear(norm(x, f"layers.{n}.ffn_norm"), f"layers.{n}.feed_forward.w1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"layers.{n}.feed_forward.w2")
    return norm(x, "norm") @ w["tok_embeddings.weight"].T


def test_what_it_computes(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases that count
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(model(tokens()), plain(model, tokens()), atol=1e-12, rtol=0)


def test_positions_are_those_given(model):
    """Of a part of the sequence, as cp has it."""
    model.layers, own = torch.nn.ModuleDict(), torch.tensor([0, 1, 10, 11])
    torch.testing.assert_close(model(tokens()[:, own], own), model(tokens())[:, own], atol=0, rtol=0)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_document_is_a_text_of_its_own(p):
    """Neither positions nor attention cross a document's end; with weights dropped, by another way of attention."""
    model = build(replace(SMALL, attention_dropout=p)).train(p > 0)
    documents = Documents.of(torch.tensor([[0] * 5 + [5] * 7, [0] * 12]))
    both, x = model(tokens(), documents=documents, sample_keys=KEYS), tokens()
    if not p:
        torch.testing.assert_close(both[:1, 5:], model(x[:1, 5:]), atol=1e-12, rtol=0)
    x[0, :5] = 16 - x[0, :5]
    changed = model(x, documents=documents, sample_keys=KEYS)
    assert torch.equal(changed[0, 5:], both[0, 5:])
    assert not torch.allclose(changed[0, :5], both[0, :5])


def test_dropped_attention_is_attention(model):
    """Its scores, weights and mask, where nothing is dropped after all."""
    expected, attention = model(tokens()), model.layers["1"].attention
    attention.dropout.p, attention.dropout.forward = 0.5, lambda x, keys: x
    torch.testing.assert_close(model(tokens()), expected, atol=1e-14, rtol=0)


def test_dropout_is_that_of_the_sample():
    model, x = build(replace(SMALL, dropout=0.3)), tokens()
    torch.testing.assert_close(model(x, sample_keys=KEYS)[1:], model(x[1:], sample_keys=KEYS[1:]), atol=1e-12, rtol=0)
    assert not torch.allclose(model(x, sample_keys=KEYS), model(x, sample_keys=KEYS.flip(0)))
    layers = [module.layer for module in model.modules() if isinstance(module, Dropout)]
    assert len(set(layers)) == len(layers) == 1 + 3 * SMALL.n_layers
    model.eval()
    torch.testing.assert_close(model(x), build(SMALL)(x), atol=0, rtol=0)


def test_dropout_of_a_part_of_the_sequence():
    """As cp and tp shard it: of 12 tokens the cp coordinate has 0…2 and 9…11, the second tp rank of that 9…11."""
    dropout, x = Dropout(0.5, 7), torch.ones(2, 12, 8)
    everything, own = dropout(x, KEYS, torch.arange(12)), torch.tensor([0, 1, 2, 9, 10, 11])
    assert torch.equal(everything, dropout(x, KEYS))
    assert torch.equal(dropout(x[:, own], KEYS, own), everything[:, own])
    dropout.shard = 1
    assert torch.equal(dropout(x[:, 9:], KEYS, own), everything[:, 9:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads 5"),
        ({"block_size": 0}, "block_size is 0"),
        ({"dropout": 1.0}, "dropout is 1.0: it must be at least 0, and below 1"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        GPT(replace(SMALL, **changes))
