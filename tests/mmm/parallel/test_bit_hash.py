"""The hash of a tensor's bits: shards add up to it, and a difference of any size and kind changes it."""

import pytest
import torch

from mmm.nn.draw import ShardBox, full_box
from mmm.parallel import fingerprint
from mmm.parallel.fingerprint import as_integers, bit_hash, keys_of

BITS_63 = (1 << 63) - 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64)


def hash_of(tensor):
    return int(bit_hash(tensor, keys_of("w", full_box(tensor), tensor)))


def drawn(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (6, 5)])
def test_each_bit_counts(shape, dtype):
    tensor = drawn(shape, dtype)
    as_it_was = hash_of(tensor)
    bits = as_integers(tensor).view(-1)
    for bit in range(bits.element_size() * 8):
        mask = torch.tensor(1, dtype=bits.dtype) << bit
        for place in {0, len(bits) // 2, len(bits) - 1}:
            bits[place] ^= mask
            assert hash_of(tensor) != as_it_was, (bit, place)
            bits[place] ^= mask
    assert hash_of(tensor) == as_it_was


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up(dtype, monkeypatch):
    """On any grid of shards, also with shards that are empty, and where a shard is hashed in several pieces."""
    tensor = drawn((6, 5, 4), dtype)
    full = hash_of(tensor) & BITS_63
    monkeypatch.setattr(fingerprint, "CPU_CHUNK", 20)
    assert hash_of(tensor) & BITS_63 == full
    for rows, columns in [(1, 5), (4, 2), (6, 1), (7, 3)]:
        total = 0
        for row in range(0, 7, rows):
            for column in range(0, 5, columns):
                shard = tensor[row : row + rows, column : column + columns]
                box = ShardBox((row, column, 0), tuple(shard.shape), tuple(tensor.shape))
                total += int(bit_hash(shard, keys_of("w", box, shard)))
        assert total & BITS_63 == full


def test_what_sums_do_not_see():
    """Signs of two numbers; the sign of a zero; rows in each other's place; four that cancel in rows and columns."""
    tensor = drawn((4, 4), torch.float64)
    others = [tensor.clone() for _ in range(4)]
    others[0][0, :2] *= -1
    others[1][1, 1] = 0.0
    tensor_with_zero = others[1].clone()
    tensor_with_zero[1, 1] = -0.0
    others[2][0], others[2][1] = tensor[1], tensor[0]
    bits = as_integers(others[3])
    bits[0, 0] += 1
    bits[1, 1] += 1
    bits[0, 1] -= 1
    bits[1, 0] -= 1
    hashes = [hash_of(each) for each in (tensor, tensor_with_zero, *others)]
    assert len(set(hashes)) == len(hashes)


def test_a_tensor_of_another_name_has_another_hash():
    tensor = drawn((4, 4))
    assert hash_of(tensor) != int(bit_hash(tensor, keys_of("v", full_box(tensor), tensor)))
