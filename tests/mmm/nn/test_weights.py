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
    init.fill_(full, rule, init.stream_key(seed, name), init.full_box(full))
    return full


def splitmix64(key, index):
    """Output number `index` of the generator, in Python's own whole numbers."""
    mask = (1 << 64) - 1
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
    # 53 random bits, between 0 and 1.
    uniform = [((splitmix64(key, i) >> 11) + 0.5) * 2.0**-53 for i in range(6)]
    expected = [NormalDist(0, 0.02).inv_cdf(u) for u in uniform]
    assert drawn((2, 3)).flatten().tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("start", [(0, 0, 0), (1, 2, 3), (4, 0, 6)])
def test_a_part_is_what_the_whole_has_there(start):
    full = drawn((5, 6, 7))
    length = (1, 4, 1) if start[1] == 2 else (1, 3, 1)
    piece = torch.empty(length, dtype=torch.float64)
    init.fill_(piece, NORMAL, init.stream_key(0, "layers.0.w"), ShardBox(start, length, (5, 6, 7)))
    box = tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))
    assert torch.equal(piece, full[box])


def test_rounded_once_from_float64():
    assert torch.equal(drawn((64, 64), dtype=torch.float32), drawn((64, 64)).float())


def test_distribution():
    normal = drawn((1000, 1000))
    assert abs(normal.mean()) < 1e-4
    assert abs(normal.std() / 0.02 - 1) < 5e-3
    kurtosis = (normal**4).mean() / (normal**2).mean() ** 2
    assert abs(kurtosis - 3) < 0.05
    assert abs(torch.corrcoef(torch.stack((normal[0], normal[1])))[0, 1]) < 0.1
    uniform = drawn((1000, 100), rule=Init("uniform", 0.5))
    assert uniform.min() >= -0.5
    assert uniform.max() < 0.5
    assert abs(uniform.std() - 1 / 12**0.5) < 3e-3


def test_names_and_seeds_have_streams_of_their_own():
    draws = [drawn((8,), name, seed) for name in ("a", "b") for seed in (0, 1)]
    assert len({tuple(d.tolist()) for d in draws}) == 4


def test_wrappers_do_not_change_the_name():
    name = "module._orig_mod.layers.3._checkpoint_wrapped_module.attention._fsdp_wrapped_module.wq.weight"
    assert init.canonical_name(name) == "layers.3.attention.wq.weight"
    assert init.stream_key(1, name) == init.stream_key(1, "layers.3.attention.wq.weight")


def test_a_layer_does_not_depend_on_the_others():
    shallow, deep = (Transformer(TransformerConfig(dim=32, n_layers=n, n_heads=4, n_kv_heads=2)) for n in (1, 2))
    for model in (shallow, deep):
        weights.initialize(model, 7)
    assert torch.equal(shallow.layers["0"].attention.wq.weight, deep.layers["0"].attention.wq.weight)
    # … but what a block writes into the residual stream gets smaller the deeper the model.
    ratio = shallow.layers["0"].attention.wo.weight.std() / deep.layers["0"].attention.wo.weight.std()
    assert ratio.item() == pytest.approx(2**0.5, rel=1e-4)


def test_a_share_of_a_large_model_costs_a_share_of_the_memory():
    """An element far into a 70B matrix is drawn alone."""
    config = PRESETS["llama-70b"]
    shape = (config.vocab_size, config.dim)
    one = torch.empty(1, 2, dtype=torch.float64)
    init.fill_(one, NORMAL, 1, ShardBox((config.vocab_size - 1, 17), (1, 2), shape))
    index = torch.tensor([(config.vocab_size - 1) * config.dim + 17])
    u = init.uniform01(1, index)
    assert one[0, 0] == torch.erfinv(2 * u - 1) * (2**0.5 * 0.02)


def test_shared_parameters_count_once():
    linear = torch.nn.Linear(3, 4)
    assert init.parameter_count([linear, linear]) == 16
