"""Dropout by itself: what it drops is a function of the sample's key, the layer and the element."""

import pytest
import torch

from mmm.nn.dropout import Dropout, sample_keys

# One key a sample: seed 3, step 5, samples 0 to 31.
KEYS = sample_keys(3, 5, 0, 32)


def dropped(keys=KEYS, p=0.3, layer=1, shape=(50, 40), shard=0):
    """Which elements a layer drops, (samples, *shape) bool."""
    dropout = Dropout(p, layer)
    dropout.shard = shard
    return dropout(torch.ones(len(keys), *shape, dtype=torch.float64), keys) == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_as_asked_for(p):
    is_dropped = dropped(p=p)
    # Five standard deviations of a mean over 64,000 elements.
    bound = 5 * (p * (1 - p) / is_dropped.numel()) ** 0.5
    assert is_dropped.double().mean().item() == pytest.approx(p, abs=bound)
    x = torch.randn(32, 50, 40, dtype=torch.float64)
    out = Dropout(p, 1)(x, KEYS)
    torch.testing.assert_close(out[~is_dropped], x[~is_dropped] / (1 - p), rtol=1e-14, atol=0)


def test_a_sample_is_the_same_in_any_batch():
    """On another number of ranks a sample lies at another place of its batch: it had another mask there."""
    masks = dropped()
    for first, size in ((0, 5), (5, 26), (31, 1)):
        assert torch.equal(dropped(sample_keys(3, 5, first, size)), masks[first : first + size])
    assert torch.equal(dropped(KEYS[[7, 2]]), masks[[7, 2]])


def test_a_shard_is_that_part_of_the_whole():
    """Ranks of tp drop what one device drops, and not each the same."""
    masks = dropped(shape=(60,))
    assert torch.equal(torch.cat([dropped(shape=(15,), shard=shard) for shard in range(4)], dim=1), masks)


def test_streams_differ():
    """Other seeds, steps, samples and layers: half of the elements agree, at p = 0.5."""
    streams = [(sample_keys(seed, step, 0, 32), layer) for seed in (3, 4) for step in (5, 6) for layer in (1, 2)]
    masks = [dropped(keys, 0.5, layer) for keys, layer in streams]
    rows = [row.flatten() for mask in (*masks, masks[0].roll(1, 0)) for row in mask[:4]]
    for i, one in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            # The rolled rows are the first ones again.
            if not (i >= 32 and j < 4):
                assert 0.4 < (one == other).double().mean() < 0.6


def test_without_keys_it_draws_as_pytorch_does():
    x = torch.randn(32, 7)
    torch.manual_seed(1)
    ours = Dropout(0.5, 1)(x, None)
    torch.manual_seed(1)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.5))


def test_gradients_pass_through_what_stays():
    x = torch.randn(32, 7, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.25, 1)(x, KEYS)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, (out != 0) / 0.75, check_dtype=False)
