"""The routed feed-forward layer by itself: against a loop over tokens, what it counts, and sizes that do not fit."""

import pytest
import torch
import torch.nn.functional as F

from mmm.models import experts, weights
from mmm.models.experts import MixtureOfExperts, to_host_list, transformer_of
from mmm.models.transformer import TransformerConfig
from mmm.parallel.memory.checkpointing import apply_checkpointing
from mmm.parallel.plans.transformer import transformer_plan

SMALL = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=32, expert_dim=24, n_experts=6)


def layer(top_k=2, n_experts=5, dtype=torch.float64):
    torch.manual_seed(0)
    moe = MixtureOfExperts(8, 12, n_experts, top_k).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    moe.expert_bias.copy_(torch.linspace(-0.2, 0.2, n_experts))
    return moe


def token_by_token(moe, x):
    """What the layer is, written out: no sorting, one token after the other. And how often each expert was chosen."""
    out, counts = [], [0] * len(moe.expert_bias)
    for token in x.reshape(-1, x.shape[-1]):
        scores = torch.sigmoid(moe.router.weight @ token)
        chosen = sorted(range(len(counts)), key=lambda e: (-(scores[e] + moe.expert_bias[e]).item(), e))[: moe.top_k]
        total = sum(scores[e] for e in chosen) if moe.top_k > 1 else 1.0
        y = 0
        for e in chosen:
            w1, w2, w3 = moe.experts.w1[e], moe.experts.w2[e], moe.experts.w3[e]
            y = y + scores[e] / total * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
            counts[e] += 1
        out.append(y)
    return torch.stack(out).view_as(x), counts


@pytest.mark.parametrize(("top_k", "n_experts"), [(1, 5), (2, 5), (3, 3), (1, 1)])
def test_as_written_out(top_k, n_experts):
    moe = layer(top_k, n_experts)
    x = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *moe.parameters()]
    expected, counts = token_by_token(moe, x)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    got = moe(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    for mine, right in zip(torch.autograd.grad(got, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)
        assert mine.abs().max() > 0  # also with top_k 1 the router learns
    assert moe.tokens_per_expert.tolist() == counts
    assert sum(counts) == 21 * top_k


def test_an_expert_that_nobody_chooses():
    moe = layer()
    moe.expert_bias[2] = -10.0
    x = torch.randn(4, 8, dtype=torch.float64)
    moe(x).square().sum().backward()
    assert moe.tokens_per_expert[2] == 0
    for parameter in moe.experts.parameters():
        assert parameter.grad[2].abs().max() == 0
        assert parameter.grad[1].abs().max() > 0
    torch.testing.assert_close(moe(x), token_by_token(moe, x)[0])


def test_one_product_for_all_experts(monkeypatch):
    """Without a read by the host; an expert that nobody chooses has a gradient of zeros."""
    moe = layer(dtype=torch.float32)
    moe.expert_bias[2] = -10.0
    x = torch.randn(40, 8, requires_grad=True)
    inputs = [x, *moe.parameters()]
    expected = moe(x)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    monkeypatch.setattr(experts, "has_grouped_product", lambda *_: True)
    monkeypatch.setattr(experts, "to_host_list", None)
    got = moe(x)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    for ours, right in zip(torch.autograd.grad(got, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


def test_bias_moves_the_choice_and_not_the_weights():
    moe = layer()
    x = torch.randn(9, 8, dtype=torch.float64)
    before = moe(x)
    moe.expert_bias += 3.0  # of all alike: nobody's choice changes
    torch.testing.assert_close(moe(x), before, rtol=0, atol=0)


def test_equal_scores_go_to_the_lower_numbers():
    moe = layer()
    torch.nn.init.zeros_(moe.router.weight)
    moe.expert_bias.zero_()
    moe(torch.randn(9, 8, dtype=torch.float64)).sum().backward()
    assert moe.tokens_per_expert.tolist() == [9, 9, 0, 0, 0]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_does_not_count_twice(mode):
    tokens = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(0))
    seen = []
    for way in ("none", mode):
        model = transformer_of(SMALL).double()
        weights.initialize(model, 0)
        forwards = []
        model.layers["1"].moe.router.register_forward_hook(lambda *_, log=forwards: log.append(1))
        apply_checkpointing(model, transformer_plan(), way)
        model(tokens).square().sum().backward()
        counts = [block.moe.tokens_per_expert.tolist() for block in model.layers.values()]
        seen.append((counts, [p.grad for p in model.parameters()], len(forwards)))
    (counts, gradients, once), (again, repeated, twice) = seen
    assert counts == again
    assert all(sum(layer) == 40 for layer in counts)
    assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))
    assert (once, twice) == (1, 2)


def test_on_the_meta_device():
    """Shapes, and operations counted, need no numbers: the tokens are spread evenly."""
    with torch.device("meta"):
        assert MixtureOfExperts(8, 12, 5, 2)(torch.empty(3, 7, 8)).shape == (3, 7, 8)
    assert to_host_list(torch.empty(2, 2, device="meta"), 10) == [2, 3, 2, 3]
    assert to_host_list(torch.tensor([[1, 2], [0, 4]]), 7) == [1, 2, 0, 4]


def test_weights_and_state():
    model = transformer_of(SMALL)
    weights.initialize(model, 0)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith("layers.0.moe")}
    assert shapes == {
        "layers.0.moe.expert_bias": (6,),
        "layers.0.moe.router.weight": (6, 16),
        "layers.0.moe.experts.w1": (6, 24, 16),
        "layers.0.moe.experts.w2": (6, 16, 24),
        "layers.0.moe.experts.w3": (6, 24, 16),
    }
    assert model.layers["0"].moe.expert_bias.tolist() == [0] * 6
    ratio = model.layers["0"].moe.experts.w1.std() / model.layers["0"].moe.experts.w2.std()
    assert ratio.item() == pytest.approx(2, rel=0.1)  # w2 writes into the residual stream: 1 / sqrt(2 · 2 layers)
    assert not hasattr(model.layers["0"], "feed_forward")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 7}, "top_k is 7"),
        ({"top_k": 0}, "top_k is 0"),
        ({"expert_dim": 0}, "expert_dim is 0"),
        ({"n_experts": -1}, "n_experts is -1"),
    ],
)
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        transformer_of(TransformerConfig(**{**vars(SMALL), **changes}))
