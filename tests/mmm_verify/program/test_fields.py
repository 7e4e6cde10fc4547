"""Scripts whose ranks have parts of a sample: which part is found; right ones are the same, and wrong ones are not."""

from pathlib import Path

import pytest
import torch

from mmm_verify import verify_program
from mmm_verify.program.parts import find_parts, starts_in
from mmm_verify.program.recorder import Recording
from mmm_verify.program.samples import samples_in
from support.clock import PATIENCE, long

FIELDS = Path(__file__).parent / "fields"


def verified(script, *args, ranks=2, **settings):
    return verify_program([str(FIELDS / script), *args], (1, ranks), timeout=PATIENCE, **settings)


@pytest.mark.parametrize(
    ("script", "ranks", "layout", "cut"),
    [
        long("buffer_of_rank_0.py", 2, "cp2", "dim 2 of 16 in 0:8, 8:16"),
        long("ensemble_group.py", 4, "dp2·cp2", "in 2 parts, each cut: dim 3 of 12 in 0:6, 6:12"),
        ("trimmed_halo.py", 3, "cp3", "dim 2 of 17 in 0:8, 4:14, 10:17"),
        long("replicated_operand.py", 4, "cp4", "dim 2 of 16 in 0:8, 8:16 and dim 3 of 12 in 0:6, 6:12"),
        long("halo_gradient.py", 2, "cp2", "dim 2 of 17 in 0:9, 9:17"),
        long("ring_keys.py", 2, "cp2", "dim 1 of 16 in 0:8, 8:16"),
        long("group_norm_sums.py", 2, "cp2", "dim 2 of 16 in 0:8, 8:16"),
        long("land_mask.py", 2, "cp2", "dim 2 of 16 in 0:8, 8:16"),
        long("own_means.py", 2, "cp2", "dim 2 of 17 in 0:9, 9:17"),
    ],
)
def test_right(script, ranks, layout, cut):
    verdict = verified(script, ranks=ranks)
    assert verdict.same, verdict
    assert verdict.layout.endswith(f"{script}, {layout}")
    assert cut in verdict.compared["batch"]


@pytest.mark.parametrize(
    ("script", "ranks", "first", "says"),
    [
        long("buffer_of_rank_0.py", 2, "the loss", "heights on rank 1: is that of rank 0, and this rank has another"),
        long("ensemble_group.py", 4, "every gradient", "1/2 times (one over the size of dp or cp) what it should be"),
        long("trimmed_halo.py", 3, "the loss", "in the sum, but"),
        long("replicated_operand.py", 4, "gradient of factor", "partial over cp: the ranks' values sum to what is"),
        ("halo_gradient.py", 2, "gradient of first", "differs"),
        long("ring_keys.py", 2, "gradient of 1.", "differs"),
        long("group_norm_sums.py", 2, "the loss", "in the mean over cp"),
        long("land_mask.py", 2, "the loss", "in the sum, but"),
        long("own_means.py", 2, "the loss", "in the mean over cp"),
    ],
)
def test_wrong(script, ranks, first, says):
    verdict = verified(script, "wrong", ranks=ranks)
    assert verdict.exit_code == 1, verdict
    assert verdict.first.startswith(first)
    assert says in str(verdict)


@pytest.mark.long
def test_parts_that_one_rank_does_not_have_are_not_compared():
    """Rows of zeros around each part are no rows of the field: nothing tells where the part is."""
    verdict = verified("halo_gradient.py", "padded")
    assert verdict.exit_code == 2, verdict
    assert "each has to be one block of what one rank has" in verdict.reason


def test_where_a_part_may_begin():
    """A block of random numbers begins at one place, also after rounding; a NaN is a value; zeros begin everywhere."""
    torch.manual_seed(0)
    full = torch.randn(2, 17, 6)
    full[0, 8] = torch.nan
    assert starts_in(full[:, 5:10] * (1 + 1e-7), full) == {(0, 5, 0)}
    assert starts_in(torch.randn(2, 5, 6), full) == set()
    assert starts_in(torch.zeros(2, 5), torch.zeros(2, 8)) == {(0, start) for start in range(4)}
    # Too many places to try.
    assert starts_in(torch.zeros(2, 5), torch.zeros(2, 100)) == set()


@pytest.mark.long
def test_a_rank_keeps_no_sample_that_it_has_in_full():
    """Ranks held, and sent, copies of all images of two steps. One with a part is still found next to one with all."""
    fields = torch.randn(4, 1, 8)
    full = samples_in(fields, known=())
    known = {sample.digest for sample in full}
    of_whole_fields = samples_in(fields, known)
    of_columns = samples_in(fields[..., 2:7], known)
    assert [sample.inputs for sample in of_whole_fields] == [None] * 4
    recordings = [Recording(samples=[samples]) for samples in (of_whole_fields, of_columns)]
    parts = find_parts(Recording(samples=[full]), recordings)
    assert parts.blocks == [(range(1), range(8)), (range(1), range(2, 7))]
    assert find_parts(Recording(samples=[full]), recordings[:1]) is None


def test_rows_that_no_rank_has():
    verdict = verified("land_mask.py", "dropped", ranks=3)
    assert verdict.exit_code == 2, verdict
    assert "24 elements are on no rank, such as that at [0, 15, 0]" in verdict.reason
