"""The next token from logits: how often each comes, and from which it is drawn."""

import pytest
import torch

from mmm.nn.sampling import Sampling

# Of four tokens.
PROBABILITIES = torch.tensor([0.05, 0.4, 0.25, 0.3])
LOGITS = PROBABILITIES.log()


def drawn(logits=LOGITS, times=2000, **options):
    """How often each token comes, (vocabulary,)."""
    sampling = Sampling(**options)
    counts = torch.zeros(len(logits))
    for step in range(times):
        counts[sampling.draw(logits, step)] += 1
    return counts / times


def test_as_often_as_its_probability():
    torch.testing.assert_close(drawn(), PROBABILITIES, rtol=0, atol=0.04)
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    torch.testing.assert_close(drawn(temperature=0.5), squared, rtol=0, atol=0.04)


def test_only_the_most_probable():
    some = torch.tensor([0.0, 0.4, 0.0, 0.3]) / 0.7
    torch.testing.assert_close(drawn(top_k=2), some, rtol=0, atol=0.04)
    # 0.4 is too little, 0.7 is enough.
    torch.testing.assert_close(drawn(top_p=0.6), some, rtol=0, atol=0.04)
    assert drawn(temperature=1e-320, times=5)[1] == 1
    assert drawn(top_p=0.39, times=50)[1] == drawn(top_k=1, times=50)[1] == drawn(temperature=0, times=5)[1] == 1
    torch.testing.assert_close(drawn(top_k=9), PROBABILITIES, rtol=0, atol=0.04)


def test_seed_and_number_decide():
    logits = torch.zeros(1000)
    texts = {seed: [Sampling(seed=seed).draw(logits, step) for step in range(20)] for seed in (1, 2)}
    assert texts[1] == [Sampling(seed=1).draw(logits, step) for step in range(20)]
    assert texts[1] != texts[2]
    assert len(set(texts[1])) > 15


def test_float32_and_float64_draw_alike():
    torch.manual_seed(0)
    logits = torch.randn(500, dtype=torch.float64)
    pairs = [(Sampling().draw(logits, n), Sampling().draw(logits.float(), n)) for n in range(100)]
    assert sum(a == b for a, b in pairs) >= 99


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_what_is_wrong(options, field):
    assert [name for name, _ in Sampling(**options).problems()] == [field]
