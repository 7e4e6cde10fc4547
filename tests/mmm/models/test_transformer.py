"""The Transformer by itself: sizes, positions, documents and data types."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmm.models.definition import of_config
from mmm.models.llama.model import PRESETS, Transformer, TransformerConfig
from mmm.models.qwen3.model import PRESETS as QWEN3
from mmm.nn import init, weights
from mmm.nn.attention import Documents
from mmm.nn.rope import RopeScaling, rotary_table, rotate

SMALL = TransformerConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=64, ffn_dim=48)


@pytest.fixture
def model():
    model = Transformer(SMALL).double()
    weights.initialize(model, 0)
    return model


def tokens(batch=2, seq=12):
    return torch.randint(0, SMALL.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("reference", 33_599_744),
        ("shakespeare", 85_347_072),
        ("shakespeare-cpu", 857_216),
        ("gpt2", 123_551_232),
        ("llama-1b", 1_235_814_400),
        ("llama2-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        # Of the folder qwen3.
        ("30b-a3b", 30_532_122_624),
    ],
)
def test_published_sizes(preset, count):
    sizes = {**PRESETS, **QWEN3}[preset]
    with torch.device("meta"):
        model = of_config(sizes).build(sizes)
    assert init.parameter_count(model) == count


def test_a_token_does_not_see_the_future(model):
    x = tokens()
    changed = x.clone()
    changed[:, 7:] = 3
    assert torch.equal(model(x)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(x)[:, 7:], model(changed)[:, 7:])


def test_rotation_is_complex_multiplication():
    cos, sin = rotary_table(torch.arange(5, 9), 8, 10_000.0)
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    angles = torch.outer(torch.arange(5, 9).double(), 10_000.0 ** -(torch.arange(4).double() / 4))
    turn = torch.polar(torch.ones(4, 4, dtype=torch.float64), angles)
    expected = torch.view_as_real(torch.view_as_complex(x.view(2, 4, 3, 4, 2)) * turn[:, None, :]).flatten(-2)
    torch.testing.assert_close(rotate(x, cos, sin), expected, atol=1e-14, rtol=0)


# Of Llama 3.1.
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def plain_frequencies(head_dim, theta, factor, low, high, length):
    """Llama 3.1's, case by case, of each wavelength."""
    frequencies = []
    for i in range(head_dim // 2):
        frequency = 1 / theta ** (2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            frequencies.append(frequency)
        elif wavelength > length / low:
            frequencies.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * frequency / factor + smooth * frequency)
    return frequencies


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (LLAMA3, plain_frequencies(128, 500_000.0, 8.0, 1.0, 4.0, 8192)),
        (replace(LLAMA3, factor=32.0), plain_frequencies(128, 500_000.0, 32.0, 1.0, 4.0, 8192)),  # of Llama 3.2
        (RopeScaling("linear", 4.0), [500_000.0 ** (-i / 64) / 4 for i in range(64)]),
    ],
    ids=["llama3", "llama3.2", "linear"],
)
def test_scaled_frequencies(scaling, expected):
    positions = torch.tensor([0, 1, 17, 131_071])
    cos, sin = rotary_table(positions, 128, 500_000.0, scaling)
    for place, position in enumerate(positions.tolist()):
        assert cos[place].tolist() == pytest.approx([math.cos(position * f) for f in expected], abs=1e-9)
        assert sin[place].tolist() == pytest.approx([math.sin(position * f) for f in expected], abs=1e-9)


def test_scaling_as_a_config_has_it():
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert RopeScaling.of({"rope_type": "llama3", "factor": 8.0, **factors}) == LLAMA3
    assert RopeScaling.of({"type": "linear", "factor": 2}) == RopeScaling("linear", 2)
    for nothing in (None, {}, {"rope_type": "default"}, {"type": "default"}):
        assert RopeScaling.of(nothing) is None
    with pytest.raises(ValueError, match="rope_scaling: 8 "):
        RopeScaling.of(8)


@pytest.mark.parametrize("grouped", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_document_does_not_see_the_one_before(model, monkeypatch, grouped):
    """Documents in one sequence are computed as each alone; positions begin anew with each."""
    # On CPU they are.
    monkeypatch.setattr("mmm.nn.attention.takes_grouped_heads", lambda _: grouped)
    # Of sample 0 three documents, of sample 1 one.
    x, begins = tokens(), [[0, 5, 6, 12], [0, 12]]
    starts = torch.tensor([[0] * 5 + [5] + [6] * 6, [0] * 12])
    together = model(x, documents=Documents.of(starts))
    for row, ends in enumerate(begins):
        for begin, end in itertools.pairwise(ends):
            alone = model(x[row : row + 1, begin:end])
            torch.testing.assert_close(together[row : row + 1, begin:end], alone, atol=1e-12, rtol=0)
    assert not torch.allclose(model(x)[0, 6:], together[0, 6:])


def test_float64_is_float64_all_the_way(model):
    """A float32 anywhere inside (norm, rotation, softmax) would leave an error of 1e-8; finite differences see it."""
    x, y = tokens(1, 6)[:, :-1], tokens(1, 6)[:, 1:]

    def loss():
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    loss().backward()
    for name in ("layers.0.attention.wq.weight", "layers.1.ffn_norm.weight", "layers.2.feed_forward.w2.weight"):
        parameter = model.get_parameter(name)
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        largest = int(gradient.abs().argmax())
        value = flat[largest].item()
        sides = []
        for side in (1e-4, -1e-4):
            flat[largest] = value + side
            with torch.no_grad():
                sides.append(loss().item())
        flat[largest] = value
        assert (sides[0] - sides[1]) / 2e-4 == pytest.approx(gradient[largest].item(), rel=1e-6)


def test_a_tied_output_is_the_embedding():
    config = replace(SMALL, tie_word_embeddings=True)
    tied, untied = Transformer(config).double(), Transformer(SMALL).double()
    assert tied.output.weight is tied.tok_embeddings.weight
    assert init.parameter_count(untied) - init.parameter_count(tied) == SMALL.vocab_size * SMALL.dim
    weights.initialize(tied, 0)
    untied.load_state_dict(tied.state_dict())
    assert torch.equal(tied(tokens()), untied(tokens()))
    # Drawn as an output: at most 1 / sqrt(dim).
    wide = Transformer(replace(config, dim=4096, n_layers=1))
    assert wide.init_rule("tok_embeddings.weight").scale == 4096**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads 5"),
        ({"dim": 36, "n_heads": 12, "n_kv_heads": 12}, "head_dim 3"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_scaling": RopeScaling("linear", 0.5)}, "factor is 0.5: it must be at least 1"),
        ({"rope_scaling": RopeScaling("linear", 10**30)}, "64 bits"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 4.0, 4.0)}, "low_freq_factor 4.0"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        Transformer(TransformerConfig(**{**vars(SMALL), **changes}))
