"""Initial weights: a function of (seed, name, element), and of nothing else."""

from statistics import NormalDist

import pytest
import torch

from mmm.models.llama.model import PRESETS, Transformer, TransformerConfig
from mmm.nn import init, weights
from mmm.nn.init import Init, ShardBox

NORMAL = Init("normal", 0.02)


def drawn(shape, name="layers.0.w", seed=0, rule=NORMAL, dtype=torch.float64):
    full = torch.empty(shape, dtype=dtype)
    key = init.stream_key(seed, name)
    init.fill_(full, rule, key, init.full_box(full))
    return full


def splitmix64(key, index):
    """Output number `index` of the generator, in Python's own whole numbers."""
    mask = (1 << 64) - 1
    # The constants of the published one.
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def test_values_never_change():
    """A run repeated years later starts from these very numbers."""
    key = init.stream_key(0, "layers.0.w")
    assert key == 11110075742819131638
    # The published first output of seed 0.
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF
    expected = []
    for index in range(6):
        # 53 random bits, between 0 and 1.
        bits = splitmix64(key, index) >> 11
        uniform = (bits + 0.5) * 2.0**-53
        expected.append(NormalDist(0, 0.02).inv_cdf(uniform))
    values = drawn((2, 3)).flatten()
    assert values.tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        ((0, 0, 0), (1, 3, 1)),
        ((1, 2, 3), (1, 4, 1)),
        # The last one of two dimensions.
        ((4, 0, 6), (1, 3, 1)),
    ],
)
def test_a_part_is_what_the_whole_has_there(start, length):
    full = drawn((5, 6, 7))
    piece = torch.empty(length, dtype=torch.float64)
    key = init.stream_key(0, "layers.0.w")
    init.fill_(piece, NORMAL, key, ShardBox(start, length, (5, 6, 7)))
    box = tuple(slice(first, first + n) for first, n in zip(start, length, strict=True))
    assert torch.equal(piece, full[box])


def test_rounded_once_from_float64():
    in_float32 = drawn((64, 64), dtype=torch.float32)
    assert torch.equal(in_float32, drawn((64, 64)).float())


def test_distribution():
    normal = drawn((1000, 1000))
    assert abs(normal.mean()) < 1e-4
    assert abs(normal.std() / 0.02 - 1) < 5e-3
    # That of a normal distribution is 3.
    kurtosis = (normal**4).mean() / (normal**2).mean() ** 2
    assert abs(kurtosis - 3) < 0.05
    correlations = torch.corrcoef(normal[:2])
    assert abs(correlations[0, 1]) < 0.1
    uniform = drawn((1000, 100), rule=Init("uniform", 0.5))
    assert uniform.min() >= -0.5
    assert uniform.max() < 0.5
    # The standard deviation of a width of 1.
    expected = 1 / 12**0.5
    assert abs(uniform.std() - expected) < 3e-3


def test_names_and_seeds_have_streams_of_their_own():
    draws = set()
    for name, seed in [("a", 0), ("a", 1), ("b", 0), ("b", 1)]:
        values = drawn((8,), name, seed)
        draws.add(tuple(values.tolist()))
    assert len(draws) == 4


def test_wrappers_do_not_change_the_name():
    name = "module._orig_mod.layers.3._checkpoint_wrapped_module.attention._fsdp_wrapped_module.wq.weight"
    assert init.canonical_name(name) == "layers.3.attention.wq.weight"
    assert init.stream_key(1, name) == init.stream_key(1, "layers.3.attention.wq.weight")


def test_a_layer_does_not_depend_on_the_others():
    attentions = []
    for n_layers in (1, 2):
        config = TransformerConfig(dim=32, n_layers=n_layers, n_heads=4, n_kv_heads=2)
        model = Transformer(config)
        weights.initialize(model, 7)
        attentions.append(model.layers["0"].attention)
    shallow, deep = attentions
    assert torch.equal(shallow.wq.weight, deep.wq.weight)
    # … but what a block writes into the residual stream gets smaller the deeper the model.
    ratio = shallow.wo.weight.std() / deep.wo.weight.std()
    assert ratio.item() == pytest.approx(2**0.5, rel=1e-4)


def test_a_share_of_a_large_model_costs_a_share_of_the_memory():
    """An element far into a 70B matrix is drawn alone."""
    config = PRESETS["llama-70b"]
    shape = (config.vocab_size, config.dim)
    # Columns 17 and 18 of the last row.
    row = config.vocab_size - 1
    drawn_alone = torch.empty(1, 2, dtype=torch.float64)
    init.fill_(drawn_alone, NORMAL, 1, ShardBox((row, 17), (1, 2), shape))
    index = torch.tensor([row * config.dim + 17])
    u = init.uniform01(1, index)
    # The inverse of the normal distribution.
    assert drawn_alone[0, 0] == torch.erfinv(2 * u - 1) * (2**0.5 * 0.02)


def test_shared_parameters_count_once():
    # A matrix of 3 × 4, and 4 biases.
    linear = torch.nn.Linear(3, 4)
    assert init.parameter_count([linear, linear]) == 16
