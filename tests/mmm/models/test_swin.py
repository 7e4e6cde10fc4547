"""The Swin by itself: windows, shifts, masks, positions."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmm.models.swin.definition import MODEL
from mmm.models.swin.model import Swin, join_windows, split_windows
from mmm.nn import weights

# 6 × 6 places, 3 × 3 windows of 2 × 2.
SMALL = replace(MODEL.small["swin"], patch_size=2, window=2)
SIDE = 6


@pytest.fixture(scope="module")
def layers():
    model = Swin(SMALL).double()
    weights.initialize(model, 0)
    return [layer.attention for layer in model.layers.values()]


def field():
    """Two samples of 6 × 6 places, 32 channels each."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, SIDE, SIDE, 32, generator=generator, dtype=torch.float64)


def turned(x, row, column):
    """A head (…, 4) as two complex numbers, each turned by the angle of its axis: base 100 to the power of 0 is 1."""
    pairs = x.unflatten(-1, (2, 2)).contiguous()
    angles = torch.tensor([row, column], dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_complex(pairs) * turns


def window_of(place, shift):
    """The places along an axis that are in the window of `place`."""
    # Windows are 2 wide, and begin at -1, 1, 3, 5 where they are shifted by 1.
    window = (place - shift) // 2
    return [other for other in range(SIDE) if (other - shift) // 2 == window]


def place_by_place(attention, x, shift):
    """What a shifted window's attention is, of each place by itself: no roll, no mask, no windows of a tensor."""
    matrices = (attention.wq, attention.wk, attention.wv)
    # (batch, rows, columns, heads, head_dim) each.
    queries, keys, values = (matrix(x).unflatten(-1, (8, 4)) for matrix in matrices)
    out = torch.empty_like(values)
    for row, column in itertools.product(range(SIDE), repeat=2):
        others = list(itertools.product(window_of(row, shift), window_of(column, shift)))
        q = turned(queries[:, row, column], row, column)
        k = torch.stack([turned(keys[:, r, c], r, c) for r, c in others], -1)
        # (batch, heads, others): the real part of the product is that of the two vectors.
        products = (q.conj().unsqueeze(-1) * k).real
        # Over the root of head_dim.
        scores = products.sum(-2) / 2
        # (batch, heads, head_dim, others)
        v = torch.stack([values[:, r, c] for r, c in others], -1)
        probabilities = scores.softmax(-1).unsqueeze(-2)
        out[:, row, column] = (probabilities * v).sum(-1)
    return attention.wo(out.flatten(-2))


@pytest.mark.parametrize("shift", [0, 1])
def test_places_attend_to_those_of_their_window(layers, shift):
    """A window of the field's both ends, a mask on the wrong side, or rows taken for columns would show here."""
    attention = layers[shift]
    assert attention.shift == shift
    expected = place_by_place(attention, field(), shift)
    torch.testing.assert_close(attention(field()), expected, atol=1e-14, rtol=0)


def test_one_window_is_not_shifted(layers):
    """There is nothing that a shift would bring together, so all places still see each other."""
    # The first block never shifts.
    plain = Swin(SMALL).double().layers["0"].attention
    plain.load_state_dict(layers[1].state_dict())
    # One window.
    x = field()[:, :2, :2]
    torch.testing.assert_close(layers[1](x), plain(x), atol=1e-14, rtol=0)


def test_windows_are_joined_as_they_were_split():
    # 2 samples of 6 × 4 places, 3 channels.
    x = torch.arange(144.0).view(2, 6, 4, 3)
    windows = split_windows(x, 2)
    assert windows.shape == (12, 4, 3)
    # The second window of the first sample: its rows 0 and 1, its columns 2 and 3.
    second = x[0, :2, 2:].reshape(4, 3)
    assert torch.equal(windows[1], second)
    assert torch.equal(join_windows(windows, 6, 4), x)


def test_every_place_reaches_every_other():
    """Two blocks join neighbouring windows; with windows that never shift, a field would fall into pieces."""
    model = Swin(SMALL).double()
    weights.initialize(model, 0)
    x = field().requires_grad_()
    h = x
    for layer in model.layers.values():
        h = layer(h)
    h[0, 0, 0].sum().backward()
    # (rows, columns)
    reached = x.grad[0].abs().sum(-1) > 0
    # 6 blocks, of which each second one reaches a window further: the whole field.
    assert bool(reached.all())
    # The other sample is not reached.
    assert not bool(x.grad[1].any())


def test_places_are_averaged():
    """The logits of an image are those of its mean place, and any size that windows divide will do."""
    model = Swin(SMALL).double()
    weights.initialize(model, 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 1, 8, 16, generator=generator, dtype=torch.float64)
    projection = model.embedding.projection
    h = F.conv2d(images, projection.weight, projection.bias, stride=2)
    # Channels last.
    h = h.permute(0, 2, 3, 1)
    for layer in model.layers.values():
        h = layer(h)
    mean = h.mean((1, 2))
    expected = model.head(F.layer_norm(mean, (32,), eps=1e-6))
    torch.testing.assert_close(model(images), expected, atol=1e-14, rtol=0)
