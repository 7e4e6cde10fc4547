"""Models without rules of their own: PyTorch's modules start as PyTorch documents them, from (seed, name) alone."""

import pytest
import torch
from torch import nn

from mmm.nn import init, weights
from mmm.nn.defaults import default_rules
from mmm.nn.init import Init

# PyTorch's modules, whose initial weights our meta initialization repeats.
MODULES = [
    lambda: nn.Linear(300, 200),
    lambda: nn.Bilinear(20, 30, 40),
    lambda: nn.Conv1d(32, 64, 5, groups=4),
    lambda: nn.Conv2d(16, 64, 3),
    lambda: nn.Conv3d(8, 32, 3, bias=False),
    lambda: nn.ConvTranspose1d(32, 64, 5),
    lambda: nn.ConvTranspose2d(32, 64, 3, groups=2),
    lambda: nn.ConvTranspose3d(32, 16, 2),
    lambda: nn.Embedding(300, 100),
    lambda: nn.Embedding(300, 100, padding_idx=7),
    lambda: nn.EmbeddingBag(300, 100),
    lambda: nn.LayerNorm(64),
    lambda: nn.GroupNorm(4, 64),
    lambda: nn.RMSNorm(64),
    lambda: nn.BatchNorm1d(64),
    lambda: nn.BatchNorm2d(64),
    lambda: nn.InstanceNorm2d(64, affine=True),
    lambda: nn.MultiheadAttention(96, 4),
    lambda: nn.MultiheadAttention(96, 4, kdim=64, vdim=48, add_bias_kv=True),
    lambda: nn.TransformerEncoderLayer(64, 4),
    lambda: nn.Transformer(64, 4, 1, 1),
    lambda: nn.LSTM(64, 96),
    lambda: nn.GRUCell(64, 96),
    lambda: nn.PReLU(8),
]


@pytest.mark.parametrize("make", MODULES)
def test_the_distributions_are_pytorchs(make):
    """Each parameter and each statistic: in spread, mean and range as PyTorch's own constructor draws it."""
    torch.manual_seed(0)
    module = make()
    own = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(77)
    weights.initialize(module, 3, empty=[name for name, _ in module.named_buffers()])
    rules = default_rules(module)
    for name, got in module.state_dict().items():
        expected = own[name].float()
        rule = rules[name]
        got = got.float()
        if rule.kind == "constant":
            assert torch.equal(got, expected), name
            continue
        # Of a spread, or of a mean over a spread.
        noise = 6 / expected.numel() ** 0.5
        wanted = expected.std().item()
        assert got.std().item() == pytest.approx(wanted, rel=noise), name
        assert got.mean().item() == pytest.approx(expected.mean().item(), abs=noise * wanted), name
        if rule.kind == "uniform":
            assert got.abs().max() <= rule.scale
            assert rule.scale * (1 - noise) <= expected.abs().max() <= rule.scale * (1 + 1e-6), name
    if getattr(module, "padding_idx", None) is not None:
        assert not module.weight[7].any()
        assert module.weight[6].any()


def test_a_part_of_an_embedding_has_its_row_of_zeros_where_it_belongs():
    rule = Init("normal", 1.0, zero_row=5)
    full = torch.ones(8, 3)
    piece = torch.ones(4, 3)
    init.fill_(full, rule, 1, init.full_box(full))
    init.fill_(piece, rule, 1, init.ShardBox((4, 0), (4, 3), (8, 3)))
    assert torch.equal(piece, full[4:])
    assert not full[5].any()
    assert full[4].all()


class Own(nn.Module):
    """Named rules first, PyTorch's for the rest."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("count", torch.tensor(3))

    def init_rule(self, name):
        return Init("constant", 0.5) if name == "scale" else None


class Everything(Own):
    """A rule for whatever is asked for: meant for parameters."""

    def init_rule(self, name):
        return Init("normal", 1.0)


def test_rules_of_its_own_come_first():
    net = Own()
    weights.initialize(net, 0)
    assert net.scale.tolist() == [0.5] * 8
    assert net.up.weight.abs().max() <= 0.5


@pytest.mark.parametrize("kind", [Own, Everything])
def test_buffers_keep_their_values(kind):
    net = kind()
    weights.initialize(net, 0)
    assert torch.equal(net.mask, torch.ones(4, 4).tril().bool())
    assert net.count.item() == 3


def test_a_buffer_that_has_a_rule_gets_it():
    class Bias(Own):
        def buffer_rule(self, name):
            return Init("constant", 9) if name == "count" else None

    net = Bias()
    weights.initialize(net, 0)
    assert net.count.item() == 9
    assert not net.mask.all()


def test_a_parameter_without_a_rule_is_named():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.token = nn.Parameter(torch.zeros(8))
            self.other = nn.Parameter(torch.zeros(8))

    with pytest.raises(ValueError, match=r"init_rule"):
        weights.initialize(Mixed(), 0)


def test_a_subclass_that_draws_its_own_numbers_has_no_rule():
    class Small(nn.Linear):
        def reset_parameters(self):
            nn.init.constant_(self.weight, 1e-3)
            nn.init.zeros_(self.bias)

    with pytest.raises(ValueError, match=r"0\.weight"):
        weights.initialize(nn.Sequential(Small(2, 2)), 0)
