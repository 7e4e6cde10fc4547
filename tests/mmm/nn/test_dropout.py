"""Dropout by itself: what it drops is a function of the sample's key, the layer and the element."""

import itertools

import pytest
import torch

from mmm.nn.dropout import Dropout, sample_keys

# One key a sample: seed 3, step 5, samples 0 to 31.
KEYS = sample_keys(3, 5, 0, 32)


def dropped(keys=KEYS, p=0.3, layer=1, shape=(50, 40), shard=0):
    """Which elements a layer drops, (samples, *shape) bool."""
    dropout = Dropout(p, layer)
    dropout.shard = shard
    ones = torch.ones(len(keys), *shape, dtype=torch.float64)
    return dropout(ones, keys) == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_as_asked_for(p):
    is_dropped = dropped(p=p)
    share = is_dropped.double().mean().item()
    # The standard deviation of a mean over 64,000 elements.
    deviation = (p * (1 - p) / is_dropped.numel()) ** 0.5
    assert share == pytest.approx(p, abs=5 * deviation)
    x = torch.randn(32, 50, 40, dtype=torch.float64)
    out = Dropout(p, 1)(x, KEYS)
    stays = ~is_dropped
    torch.testing.assert_close(out[stays], x[stays] / (1 - p), rtol=1e-14, atol=0)


def test_a_sample_is_the_same_in_any_batch():
    """On another number of ranks a sample lies at another place of its batch: it had another mask there."""
    masks = dropped()
    for first, size in ((0, 5), (5, 26), (31, 1)):
        keys = sample_keys(3, 5, first, size)
        assert torch.equal(dropped(keys), masks[first : first + size])
    in_another_order = [7, 2]
    assert torch.equal(dropped(KEYS[in_another_order]), masks[in_another_order])


def test_a_shard_is_that_part_of_the_whole():
    """Ranks of tp drop what one device drops, and not each the same."""
    masks = dropped(shape=(60,))
    shards = [dropped(shape=(15,), shard=shard) for shard in range(4)]
    assert torch.equal(torch.cat(shards, dim=1), masks)


def test_streams_differ():
    """Other seeds, steps, samples and layers: half of the elements agree, at p = 0.5."""
    rows = []
    for seed, step, layer in itertools.product((3, 4), (5, 6), (1, 2)):
        mask = dropped(sample_keys(seed, step, 0, 32), 0.5, layer)
        # Some samples of each stream, neighbours and the last, of 2,000 elements.
        rows += mask[[0, 1, 2, 3, 31]].flatten(1)
    assert len(rows) == 8 * 5
    for one, other in itertools.combinations(rows, 2):
        agreement = (one == other).double().mean()
        assert 0.4 < agreement < 0.6


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
