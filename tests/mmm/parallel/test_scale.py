"""What a rank pays for the number of ranks: nothing in a step."""

import torch

from mmm.run.rows import sums_in_order


def test_the_sum_of_losses_is_the_same_to_the_last_bit():
    """Rank after rank, as one would add them by hand."""

    table = torch.randn(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    expected = [0.0]
    for row in table.tolist():
        expected = [total + value for total, value in zip(expected, row, strict=True)]
    assert sums_in_order(table) == expected
