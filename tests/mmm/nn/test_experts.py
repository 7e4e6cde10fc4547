"""The routed feed-forward layer by itself: against a loop over tokens, what it counts, and sizes that do not fit."""

import pytest
import torch
import torch.nn.functional as F

from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn.experts import MixtureOfExperts

# Six experts a layer.
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
    out = []
    counts = [0] * len(moe.expert_bias)
    for token in x.reshape(-1, x.shape[-1]):
        scores = torch.sigmoid(moe.router.weight @ token)
        # The bias counts for the choice, not for the weight. Of equals, the first.
        ranking = [-(scores[e] + moe.expert_bias[e]).item() for e in range(len(counts))]
        chosen = sorted(range(len(counts)), key=lambda e: (ranking[e], e))[: moe.top_k]
        total = sum(scores[e] for e in chosen) if moe.top_k > 1 else 1.0
        y = 0
        for e in chosen:
            w1 = moe.experts.w1[e]
            w2 = moe.experts.w2[e]
            w3 = moe.experts.w3[e]
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
    for ours, right in zip(torch.autograd.grad(got, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-12)
        # Also with top_k 1 the router learns.
        assert ours.abs().max() > 0
    assert moe.tokens_per_expert.tolist() == counts
    assert sum(counts) == 21 * top_k


@pytest.mark.parametrize("norm_topk", [False, True])
def test_a_softmax_has_no_bias_and_is_as_written_out(norm_topk):
    """A bias that moves could not be exported: the files of Mixtral and Qwen3-MoE have none."""
    torch.manual_seed(0)
    moe = MixtureOfExperts(8, 12, 5, 2, softmax=True, norm_topk=norm_topk).double()
    x = torch.randn(7, 8, dtype=torch.float64)
    rows = []
    for token in x:
        scores, chosen = (moe.router.weight @ token).softmax(0).topk(2)
        if norm_topk:
            scores = scores / scores.sum()
        w1, w2, w3 = (matrix[chosen] for matrix in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
        outputs = w2 @ (F.silu(w1 @ token) * (w3 @ token)).unsqueeze(-1)
        rows.append(scores @ outputs.squeeze(-1))
    torch.testing.assert_close(moe(x), torch.stack(rows), rtol=1e-12, atol=1e-13)
    moe.move_bias(0.1, torch.ones(5))
    assert not moe.expert_bias.any()
    assert "expert_bias" not in moe.state_dict()


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


def test_bias_moves_the_choice_and_not_the_weights():
    moe = layer()
    x = torch.randn(9, 8, dtype=torch.float64)
    before = moe(x)
    # Of all alike: nobody's choice changes.
    moe.expert_bias += 3.0
    torch.testing.assert_close(moe(x), before, rtol=0, atol=0)


def test_equal_scores_go_to_the_lower_numbers():
    moe = layer()
    torch.nn.init.zeros_(moe.router.weight)
    moe.expert_bias.zero_()
    moe(torch.randn(9, 8, dtype=torch.float64)).sum().backward()
    assert moe.tokens_per_expert.tolist() == [9, 9, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 7}, "top_k is 7"),
        ({"top_k": 0}, "top_k is 0"),
        ({"expert_dim": 0}, "expert_dim is 0"),
        ({"n_experts": -1}, "n_experts is -1"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        Transformer(TransformerConfig(**{**vars(SMALL), **changes}))
