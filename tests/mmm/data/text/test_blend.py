"""Corpora that are blended by weights: how often each comes, in which order, and what is refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mmm.data.text.blend import Blend, BlendedTokens
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.sources import open_sources
from mmm.data.text.tokens import TextTokens
from mmm.errors import ConfigError, DataError, UserError
from mmm.layout import PADDING
from mmm.run.command_line import configure
from mmm.trainer import lm

SEQ = 4
# How many sequences each of two corpora has. Token n of both stands for their sequence n.
SIZES = (5, 23)


def tokens_of(first, sequences, seed, shuffle=True):
    """Sequence n of them is token `first` + n, `SEQ` times."""
    tokens = np.arange(first, first + sequences, dtype=np.uint16)
    text = np.repeat(tokens, SEQ)
    # The last sequence has a target after its end.
    text = np.append(text, text[-1:])
    return TextTokens(text, SEQ, seed, shuffle)


def blend(weights=(0.6, 0.4), seed=3, shuffle=True):
    parts = [tokens_of(100 * index, size, seed, shuffle) for index, size in enumerate(SIZES)]
    return BlendedTokens(parts, weights)


def order(blended, epochs):
    """The first token of each sequence."""
    tokens = []
    for epoch in range(epochs):
        tokens += [blended.sample(epoch, place)[0] for place in range(blended.samples)]
    return tokens


@pytest.mark.parametrize("weights", [(0.6, 0.4), (6, 4), (0.01, 5)])
def test_each_corpus_has_its_share_and_each_sequence_its_turn(weights):
    """A corpus that began anew with each epoch would show its first sequences only, or some twice."""
    blended = blend(weights)
    # Of an epoch, which has as many sequences as both corpora: 5 + 23.
    first_share = round(28 * weights[0] / sum(weights))
    shares = [first_share, 28 - first_share]
    assert blended.shares == shares
    for epoch in range(3):
        tokens = [blended.sample(epoch, place)[0] for place in range(28)]
        assert sum(token < 100 for token in tokens) == first_share
    epochs = 40
    counts = Counter(order(blended, epochs))
    for index, (size, share) in enumerate(zip(SIZES, shares, strict=True)):
        turns = [counts[100 * index + sequence] for sequence in range(size)]
        assert sum(turns) == epochs * share
        assert max(turns) - min(turns) <= 1


def test_corpora_are_mixed_anew_for_each_seed():
    """And do not come one after the other."""
    orders = {tuple(order(blend(seed=seed), 1)) for seed in range(3)}
    assert len(orders) == 3
    places = [place for place, token in enumerate(order(blend(), 1)) if token < 100]
    assert min(places) < 5
    assert max(places) > 22


def test_a_batch_is_the_same_on_every_mesh_and_at_every_step():
    """Of one seed, whoever reads it, and in whatever order."""
    one, other = blend(), blend()
    for step in (9, 2):
        # The second half of the batch is read first.
        second = other.batch(step, 4, 2, 2)
        first = other.batch(step, 4, 0, 2)
        both = torch.cat([first.inputs, second.inputs])
        assert torch.equal(one.batch(step, 4, 0, 4).inputs, both)


def test_validation_is_the_same_for_every_seed_and_padded_at_its_end():
    one = blend(seed=1, shuffle=False)
    other = blend(seed=2, shuffle=False)
    assert order(one, 1) == order(other, 1)
    assert one.has_padding
    # A batch of 30, of which there are 28.
    batch = one.batch(0, 30, 0, 30)
    assert (batch.targets[28:] == PADDING).all()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words, " * 60)
    Path("b.txt").write_text("or others. " * 90)
    Path("c.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 40)
    prepare(Preparation((Path("b.txt"),), Path("bytes"), "bytes"), 1)
    prepare(Preparation((Path("b.txt"),), Path("chars"), "chars"), 1)
    return tmp_path


def opened(*names, weights=(0.5, 0.5)):
    corpora = [open_sources([Path(name)]) for name in names]
    return Blend(corpora, weights)


def test_a_text_and_a_folder_of_tokens(folder):
    both = opened("a.txt", "bytes")
    training, _ = both.tokens(8, 0, 256)
    samples = [training.sample(0, place) for place in range(training.samples)]
    texts = [bytes(sample.astype(np.uint8)) for sample in samples]
    # Of "some words, ", what has an r has "wo" as well.
    assert sum(b"wo" in text for text in texts) > 10
    assert sum(b"r" in text and b"wo" not in text for text in texts) > 10
    assert both.notes(8)[0].startswith("a.txt: ")
    other = opened("a.txt", "bytes", weights=(0.4, 0.6))
    assert other.describe()["sha256"] != both.describe()["sha256"]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (("a.txt", "chars"), (1.0, 1.0), r"different tokenizers \(a.txt: bytes, 256 tokens; .*chars"),
        (("a.txt", "bytes"), (1e-6, 1.0), "a.txt gets none of the 1.. sequences"),
        (("short", "a.txt"), (1.0, 1.0), "--text short: a text of"),
    ],
)
def test_corpora_that_do_not_go_together(folder, names, weights, message):
    Path("short").write_text("s" * 12)
    with pytest.raises((ConfigError, DataError), match=message):
        opened(*names, weights=weights).tokens(8, 0, 256)


@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        (("a.txt", "b.txt"), (1.0,), "--text_weights has 1 number, and --text names 2 files"),
        (("a.txt",), (1.0,), "--text_weights has 1 number, and --text names 1 file"),
        ((), (0.5, 0.5), "--text names 0 files"),
        (("a.txt", "b.txt"), (1.0, 0.0), "--text_weights 0.0"),
        (("a.txt", "b.txt"), (1.0, -1.0), "--text_weights -1.0"),
        (("a.txt", "b.txt"), (float("nan"), 1.0), "--text_weights nan"),
    ],
)
def test_weights_that_are_wrong(folder, text, weights, message):
    with pytest.raises(UserError, match=message) as refused:
        configure(lm.Config, text=tuple(map(Path, text)), text_weights=weights, outdir=folder / "out")
    assert "\n" not in str(refused.value)
