"""Documents in sequences: whole, each once an epoch; where each begins; no target across an end; what is refused."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch

from mmm.data.text.documents import PackedTokens, firsts_in_order
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.sources import open_sources
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.errors import ConfigError, DataError
from mmm.layout import PADDING

SEQ = 16
LENGTHS = np.random.RandomState(0).geometric(0.12, 400)  # tokens of each document; 13 % are longer than SEQ + 1
ENDS = LENGTHS.cumsum()
TOKENS = np.arange(ENDS[-1])  # each another


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "tokens.bin"
    TOKENS.astype("<i4").tofile(path)
    return TokenFile(path, np.dtype("<i4"))


def packed(text, ends=ENDS, seed=3, **flags):
    return PackedTokens(text, ends, SEQ, seed, **{"vocab_size": 1 << 20, "document_starts": True, **flags})


def pieces(row):
    """The documents of a sample of a file whose tokens count upwards: lists of all their tokens."""
    inputs, targets, starts = row
    documents = []
    for start in np.unique(starts):
        of_document = starts == start
        assert np.flatnonzero(of_document).tolist() == list(range(start, start + of_document.sum()))
        if (targets[of_document] == PADDING).all():
            assert (inputs[of_document] == 0).all()
            assert start + of_document.sum() == SEQ
            continue
        assert (targets[of_document] == inputs[of_document] + 1).all()
        assert (np.diff(inputs[of_document]) == 1).all()
        documents.append([*inputs[of_document].tolist(), int(targets[of_document][-1])])
    return documents


def whole(first=0, last=None):
    """What the sequences are to have: documents of two tokens at least; of longer ones, parts that overlap by the token
    that is the last target of one and the first input of the next."""
    expected = Counter()
    for begin, end in zip(ENDS - LENGTHS, ENDS, strict=True):
        begin, end = max(begin, first), min(end, ENDS[-1] if last is None else last)
        expected.update((start, min(start + SEQ, end - 1)) for start in range(begin, end - 1, SEQ))
    return expected


def test_an_epoch_has_every_document_once_and_whole(text):
    tokens = packed(text)
    orders = []
    for epoch in (0, 1):
        samples = [pieces(tokens.sample(epoch, place)) for place in range(tokens.samples)]
        assert Counter((piece[0], piece[-1]) for row in samples for piece in row) == whole()
        orders.append([row[0][0] for row in samples])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] != sorted(orders[1])
    filled = sum(len(piece) - 1 for row in samples for piece in row) / (tokens.samples * SEQ)
    assert filled > 0.75


def test_training_and_validation_share_no_target(text):
    train, validation = text.split()
    for split, (first, last) in ((train, (0, train.end)), (validation, (train.end, None))):
        tokens = packed(split, shuffle=False)
        samples = [pieces(tokens.sample(0, place)) for place in range(tokens.samples)]
        assert Counter((piece[0], piece[-1]) for row in samples for piece in row) == whole(first, last)


def test_a_size_that_does_not_fit_begins_the_next_bin():
    assert firsts_in_order(np.array([9, 7, 1, 16, 15, 2]), 16).tolist() == [0, 2, 3, 4, 5, 6]
    assert firsts_in_order(np.array([], np.int64), 16).tolist() == [0]
    sizes = np.random.RandomState(1).randint(1, 17, 2000)
    firsts = firsts_in_order(sizes, 16)
    bins = np.split(sizes, firsts[1:-1])
    assert max(map(sum, bins)) == 16
    for one, following in itertools.pairwise(bins):
        assert sum(one) + following[0] > 16


def test_sequences_have_neighbouring_documents_in_order(text):
    tokens = packed(text, shuffle=False)
    first_tokens = [piece[0] for place in range(tokens.samples) for piece in pieces(tokens.sample(0, place))]
    assert first_tokens == sorted(first_tokens)


def test_documents_without_tokens(text):
    ends = np.sort(np.concatenate((ENDS, ENDS[::7], ENDS[::7])))
    for place in range(30):
        assert np.array_equal(packed(text, ends).sample(0, place).shape, (3, SEQ))
    samples = [pieces(packed(text, ends).sample(0, place)) for place in range(packed(text, ends).samples)]
    assert Counter((piece[0], piece[-1]) for row in samples for piece in row) == whole()


def test_a_batch_is_a_function_of_seed_and_step(text):
    after_others = packed(text, seed=3)
    for step in range(20):
        after_others.batch(step, 8, 0, 8)
    full = packed(text, seed=3).batch(20, 8, 0, 8)
    parts = [after_others.batch(20, 8, first, 2) for first in range(0, 8, 2)]
    for get in (lambda b: b.inputs, lambda b: b.targets, lambda b: b.documents.start_of_token):
        assert torch.equal(torch.cat([get(batch) for batch in parts]), get(full))
        assert get(full).shape == (8, SEQ)
    assert full.has_padding
    assert not torch.equal(packed(text, seed=4).batch(20, 8, 0, 8).inputs, full.inputs)
    assert all(map(torch.equal, full.to(torch.device("cpu")).documents, full.documents))


def refused(folder, message, **flags):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)) as caught:
        open_sources([folder], token_dtype="uint16").tokens(SEQ, 0, 256, **flags)
    assert "\n" not in str(caught.value)


def test_texts_that_do_not_say_where_documents_end(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 99)
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    for name in ("a.txt", "a.bin"):
        refused(tmp_path / name, f"--pack: {tmp_path / name} does not say where documents end", pack=True)
        refused(tmp_path / name, "--document_mask", document_mask=True)
    with pytest.raises(ConfigError, match="standard library does not say where documents end"):
        open_sources().tokens(SEQ, 0, 256, pack=True)


def test_refused(text, tmp_path):
    with pytest.raises(DataError, match="none of its 3265 documents has two tokens"):
        packed(text, TOKENS + 1)
    with pytest.raises(DataError, match="token 3265"):
        packed(text, ENDS[:-1])
    with pytest.raises(DataError, match="the ends of its documents are not in order"):
        packed(text, np.concatenate((ENDS[:50], ENDS[[51, 50]], ENDS[52:])))
    with pytest.raises(DataError, match="the ends of its documents are not in order"):
        packed(text, np.concatenate((ENDS[:1], np.zeros(len(ENDS) - 2, np.int64), ENDS[-1:])))
    with pytest.raises(DataError, match=r"token \d+, and the model's vocabulary ends at 9"):
        packed(text, vocab_size=10)
    largest = len(TOKENS) - 1
    with pytest.raises(DataError, match=rf"{largest}"):
        packed(text, vocab_size=largest, shuffle=False)
    packed(text, vocab_size=largest + 1, shuffle=False)
    with pytest.raises(DataError, match=r"the data has \d+ sequences of 16 tokens, fewer than one global batch"):
        packed(text).steps_per_epoch(1000)


def test_a_folder_whose_documents_are_truncated(tmp_path):
    (tmp_path / "a.txt").write_text("one,two,three," * 40)
    prepare(Preparation((tmp_path / "a.txt",), tmp_path / "out", separator=","), 1)
    train, validation = open_sources([tmp_path / "out"]).tokens(SEQ, 0, 256, pack=True, document_mask=True)
    assert train.batch(0, 4, 0, 4).documents.start_of_token.shape == (4, SEQ)
    assert validation.samples > 0
    documents = tmp_path / "out" / "documents.bin"
    documents.write_bytes(documents.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"documents\.bin is not of"):
        open_tokens(tmp_path / "out")
