"""What a rank sends in one call, by the best algorithm."""

import pytest

from mmm.models.costs import heads_over_cp
from mmm.parallel.collective_bytes import Call, factor


def test_stated_algorithms():
    """No rank sends more than the factor says, and all together move what has to be moved."""
    n, whole = 4, 4800

    def sent(operation: str, **more) -> list[float]:
        return [Call(operation, n, rank, whole, root=1, **more).sent() for rank in range(n)]

    assert sent("all_reduce") == [7200.0] * n
    assert sent("all_gather") == sent("reduce_scatter") == [3600.0] * n
    assert sent("broadcast") == [0.0, 4800.0, 4800.0, 4800.0]  # the chain 1 2 3 0
    assert sent("reduce") == [4800.0, 0.0, 4800.0, 4800.0]
    assert sent("all_to_all", leaving=3600) == [3600.0] * n
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert max(sent(operation)) == factor(operation, n) * whole
        assert Call(operation, 1, 0, whole).sent() == 0


@pytest.mark.parametrize(
    ("n_kv_heads", "tp", "ulysses", "heads"),
    [
        (8, 2, 1, 4),  # tp shards them
        (2, 4, 1, 1),  # more tp ranks than heads: two ranks have the same one
        (2, 4, 2, 2),  # and it is repeated for Ulysses
        (6, 1, 4, 12),
    ],
)
def test_key_value_heads_that_travel_over_cp(n_kv_heads, tp, ulysses, heads):
    assert heads_over_cp(n_kv_heads, tp, ulysses) == heads
