"""Groups for each direction between two ranks of a pipeline."""

import pytest

from mmm.parallel.mesh import neighbour_rounds


@pytest.mark.parametrize("pp", range(2, 10))
def test_rounds_have_each_pair_once(pp):
    rounds = neighbour_rounds(pp)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank is in two groups of a round"
    found = sorted(frozenset(pair) for pairs in rounds for pair in pairs)
    assert len(found) == len(set(found))
    assert set(found) == {frozenset((at, (at + 1) % pp)) for at in range(pp)}
    assert len(rounds) == (1 if pp == 2 else 2 + pp % 2)
