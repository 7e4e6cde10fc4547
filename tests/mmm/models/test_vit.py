"""The Vision Transformer by itself: sizes, patches, attention and initial weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmm.models.vit.model import PRESETS, ViT, ViTConfig
from mmm.nn import init, weights

SMALL = ViTConfig(image_size=12, patch_size=4, channels=2, classes=7, dim=16, n_layers=3, n_heads=4)


def build(config=SMALL, dtype=torch.float64):
    model = ViT(config).to(dtype)
    weights.initialize(model, 0)
    return model


@pytest.fixture
def model():
    return build()


def images(batch=3):
    return torch.randn(batch, 2, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_large_is_the_published_size():
    with torch.device("meta"):
        model = ViT(PRESETS["large"])
    assert init.parameter_count(model) == 304_250_856
    assert init.parameter_count(model.embedding) == 768 * 1024 + 1024 + 196 * 1024
    block = 2 * 2 * 1024 + 4 * 1024 * 1024 + 1024 + 2 * 4 * 1024 * 1024 + 4096 + 1024
    assert init.parameter_count(model.layers["0"]) == block == 12_593_152
    assert init.parameter_count([model.norm, model.head]) == 2 * 1024 + 1000 * 1024 + 1000


def test_patches_are_a_convolution(model):
    """One matrix for every patch is a convolution whose step is its size."""
    kernel = model.embedding.projection.weight.view(16, 2, 4, 4)
    expected = F.conv2d(images(), kernel, model.embedding.projection.bias, stride=4).flatten(2).transpose(1, 2)
    got = model.embedding(images())
    torch.testing.assert_close(got, expected + model.embedding.positions, atol=1e-14, rtol=0)
    assert got.shape == (3, 9, 16)


def test_patches_have_places(model):
    """Without positions the model cannot tell an image from the same patches in another order."""
    mixed = images().view(3, 2, 3, 4, 12).flip(2).reshape(3, 2, 12, 12)
    assert (model(mixed) - model(images())).abs().max() > 1e-6
    model.embedding.positions.data.zero_()
    torch.testing.assert_close(model(mixed), model(images()), atol=1e-14, rtol=0)


def gradients(model):
    F.cross_entropy(model(images()), torch.tensor([1, 6, 0])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_both_attentions_agree():
    native = build(replace(SMALL, attention="native"))
    fused = build(SMALL)
    torch.testing.assert_close(fused(images()), native(images()), atol=1e-14, rtol=0)
    expected = gradients(native)
    for name, gradient in gradients(fused).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-14, rtol=1e-10)


def test_pytorchs_encoder_gives_the_same(model):
    """Blocks, then the mean, then the norm: written with `nn.TransformerEncoderLayer`, its biases of q, k, v at 0."""
    h = model.embedding(images())
    for layer in model.layers.values():
        encoder = torch.nn.TransformerEncoderLayer(
            16, 4, 64, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True, dtype=torch.float64
        )
        attention = layer.attention
        state = {
            "self_attn.in_proj_weight": torch.cat([w.weight for w in (attention.wq, attention.wk, attention.wv)]),
            "self_attn.in_proj_bias": torch.zeros(48),
        }
        for theirs, ours in {
            "self_attn.out_proj": attention.wo,
            "linear1": layer.mlp.fc1,
            "linear2": layer.mlp.fc2,
            "norm1": layer.attention_norm,
            "norm2": layer.mlp_norm,
        }.items():
            state |= {f"{theirs}.weight": ours.weight, f"{theirs}.bias": ours.bias}
        encoder.load_state_dict(state)
        h = encoder(h)
    expected = model.head(F.layer_norm(h.mean(1), (16,), eps=1e-6))
    torch.testing.assert_close(model(images()), expected, atol=1e-13, rtol=0)


def test_initial_weights(model):
    assert torch.equal(model.norm.weight, torch.ones(16, dtype=torch.float64))
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert model.init_rule("layers.2.mlp.fc2.weight").scale == pytest.approx(0.02 / 6**0.5)
    assert model.init_rule("embedding.projection.weight").scale == pytest.approx(32**-0.5)
    assert model.init_rule("head.weight").scale == model.init_rule("embedding.positions").scale == 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 5}, "image_size 12"),
        ({"channels": 0}, "channels is 0"),
        ({"attention": "fast"}, "attention 'fast' is not one of native, sdpa"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        ViT(replace(SMALL, **changes))


def test_images_that_do_not_fit(model):
    with pytest.raises(ValueError, match=r"\(1, 12, 12\)"):
        model(images()[:, :1])
