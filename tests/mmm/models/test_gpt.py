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
# Seed 1, step 2, samples 0 and 1.
KEYS = sample_keys(1, 2, 0, 2)


def build(config=SMALL, dtype=torch.float64):
    model = GPT(config).to(dtype)
    weights.initialize(model, 0)
    return model


def assert_close(computed, expected, most=0.0):
    """`most`: by how much they may differ. Of 0, they are the same bit by bit."""
    torch.testing.assert_close(computed, expected, atol=most, rtol=0)


@pytest.fixture
def model():
    return build()


def tokens():
    """Two samples as long as the model takes them: (2, 12)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(17, (2, 12), generator=generator)


@pytest.mark.parametrize(
    ("preset", "without_positions", "block"),
    [("gpt2", 123_587_328, 1024), ("shakespeare", 10_646_784, 256), ("shakespeare-cpu", 795_904, 64)],
)
def test_numbers_of_parameters_are_those_that_nanogpt_prints(preset, without_positions, block):
    config = PRESETS[preset]
    dim = config.dim
    with torch.device("meta"):
        count = init.parameter_count(GPT(config))
    # q, k and v are 3 dim², what follows them 1, the MLP 2 · 4; and two norms, none with a bias.
    layer = 12 * dim**2 + 2 * dim
    # Embeddings, which are the head as well, and the last norm.
    rest = dim * (config.vocab_size + 1)
    assert count - config.position_parameters == without_positions
    assert without_positions == config.n_layers * layer + rest
    assert config.position_parameters == block * dim


def test_gpt2_with_biases_is_the_published_one():
    config = replace(PRESETS["gpt2"], vocab_size=50_257, bias=True)
    with torch.device("meta"):
        model = GPT(config)
    assert init.parameter_count(model) == 124_439_808


def test_initial_weights_are_gpt2s():
    config = replace(SMALL, dim=64, n_layers=8)
    for name, parameter in build(config).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0.0).all(), name
        elif "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            expected = 0.02
            # What is added to the residual stream, twice in each of 8 layers.
            if name.endswith(("wo.weight", "w2.weight")):
                expected /= math.sqrt(2 * 8)
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_the_first_loss_is_that_of_a_guess():
    model = build(PRESETS["shakespeare-cpu"], torch.float32)
    # 12 samples of 64 tokens, and the token after them; of 65 tokens in all.
    x = torch.randint(65, (12, 65), generator=torch.Generator().manual_seed(1))
    logits = model(x[:, :-1]).flatten(0, 1)
    targets = x[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(math.log(65), abs=0.05)


def plain(model, tokens):
    """What it computes, without a mask's kernel, matrices of all heads, or a module of ours."""
    w = dict(model.named_parameters())
    size = SMALL.head_dim
    seq = tokens.shape[1]
    # (queries, keys): the keys that come after a query.
    later = torch.ones(seq, seq, dtype=torch.float64).triu(1)

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)
        x = x / (variance + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def attention(qkv):
        outputs = []
        # q, k and v of a head lie side by side.
        for of_head in qkv.split(3 * size, dim=-1):
            q, k, v = of_head.split(size, dim=-1)
            scores = q @ k.mT / math.sqrt(size)
            probabilities = (scores - 1e9 * later).softmax(-1)
            outputs.append(probabilities @ v)
        return torch.cat(outputs, -1)

    x = w["tok_embeddings.weight"][tokens] + w["pos_embeddings.weight"][:seq]
    for n in range(SMALL.n_layers):
        normed = norm(x, f"layers.{n}.attention_norm")
        qkv = linear(normed, f"layers.{n}.attention.wqkv")
        x = x + linear(attention(qkv), f"layers.{n}.attention.wo")
        normed = norm(x, f"layers.{n}.ffn_norm")
        hidden = linear(normed, f"layers.{n}.feed_forward.w1")
        # The GELU: x Φ(x).
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"layers.{n}.feed_forward.w2")
    return norm(x, "norm") @ w["tok_embeddings.weight"].T


def test_what_it_computes(model):
    for name, parameter in model.named_parameters():
        # They are zeros, which would hide that one is not added.
        if name.endswith("bias"):
            generator = torch.Generator().manual_seed(3)
            torch.nn.init.normal_(parameter, generator=generator)
    assert_close(model(tokens()), plain(model, tokens()), 1e-12)


def test_positions_are_those_given(model):
    """Of a part of the sequence, as cp has it."""
    # Without attention a token does not depend on others.
    model.layers = torch.nn.ModuleDict()
    own = torch.tensor([0, 1, 10, 11])
    full = model(tokens())
    sharded = model(tokens()[:, own], own)
    assert_close(sharded, full[:, own])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_document_is_a_text_of_its_own(p):
    """Neither positions nor attention cross a document's end; with weights dropped, by another way of attention."""
    model = build(replace(SMALL, attention_dropout=p)).train(p > 0)
    # Of each token, where its document begins: the first sample has two, of 5 and 7 tokens.
    starts = torch.tensor([[0] * 5 + [5] * 7, [0] * 12])
    documents = Documents.of(starts)
    x = tokens()
    both = model(x, documents=documents, sample_keys=KEYS)
    if not p:
        second = model(x[:1, 5:])
        assert_close(both[:1, 5:], second, 1e-12)
    # Other tokens, of which there are 17, in the first document only.
    x[0, :5] = 16 - x[0, :5]
    changed = model(x, documents=documents, sample_keys=KEYS)
    assert torch.equal(changed[0, 5:], both[0, 5:])
    assert not torch.allclose(changed[0, :5], both[0, :5])


def test_dropped_attention_is_attention(model):
    """Its scores, weights and mask, where nothing is dropped after all."""
    expected = model(tokens())
    dropout = model.layers["1"].attention.dropout
    dropout.p = 0.5
    dropout.forward = lambda x, keys: x
    assert_close(model(tokens()), expected, 1e-14)


def test_dropout_is_that_of_the_sample():
    model = build(replace(SMALL, dropout=0.3))
    x = tokens()
    both = model(x, sample_keys=KEYS)
    second = model(x[1:], sample_keys=KEYS[1:])
    assert_close(both[1:], second, 1e-12)
    exchanged = model(x, sample_keys=KEYS.flip(0))
    assert not torch.allclose(both, exchanged)
    # A stream of its own for the embeddings, and for three places of each layer.
    layers = [module.layer for module in model.modules() if isinstance(module, Dropout)]
    assert len(layers) == 1 + 3 * SMALL.n_layers
    assert len(set(layers)) == len(layers)
    model.eval()
    assert_close(model(x), build(SMALL)(x))


def test_dropout_of_a_part_of_the_sequence():
    """As cp and tp shard it: of 12 tokens the cp coordinate has 0…2 and 9…11, the second tp rank of that 9…11."""
    dropout = Dropout(0.5, 7)
    x = torch.ones(2, 12, 8)
    everything = dropout(x, KEYS, torch.arange(12))
    assert torch.equal(everything, dropout(x, KEYS))
    own = torch.tensor([0, 1, 2, 9, 10, 11])
    of_cp = dropout(x[:, own], KEYS, own)
    assert torch.equal(of_cp, everything[:, own])
    dropout.shard = 1
    of_tp = dropout(x[:, 9:], KEYS, own)
    assert torch.equal(of_tp, everything[:, 9:])


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
