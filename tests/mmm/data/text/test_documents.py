"""Documents in sequences: whole, each once an epoch; where each begins; no target across an end; what is refused."""

import itertools
import operator
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
# Tokens of each of 400 documents; 13 % are longer than SEQ + 1.
LENGTHS = np.random.RandomState(0).geometric(0.12, 400)
ENDS = LENGTHS.cumsum()
# Each another, so that a token says where in the file it is from.
TOKENS = np.arange(ENDS[-1])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "tokens.bin"
    TOKENS.astype("<i4").tofile(path)
    return TokenFile(path, np.dtype("<i4"))


def packed(text, ends=ENDS, seed=3, **flags):
    flags = {"vocab_size": 1 << 20, "document_starts": True, **flags}
    return PackedTokens(text, ends, SEQ, seed, **flags)


def pieces(row):
    """The documents of a sample of a file whose tokens count upwards: lists of all their tokens."""
    inputs, targets, starts = row
    documents = []
    for start in np.unique(starts):
        places = np.flatnonzero(starts == start)
        end = start + len(places)
        assert places.tolist() == list(range(start, end))
        own_inputs = inputs[places]
        own_targets = targets[places]
        # What fills up the end of a sample.
        if (own_targets == PADDING).all():
            assert (own_inputs == 0).all()
            assert end == SEQ
            continue
        assert (own_targets == own_inputs + 1).all()
        assert (np.diff(own_inputs) == 1).all()
        documents.append([*own_inputs.tolist(), int(own_targets[-1])])
    return documents


def samples_of(tokens, epoch=0):
    """The documents of each sample of an epoch."""
    return [pieces(tokens.sample(epoch, place)) for place in range(tokens.samples)]


def counted(samples):
    """How often each document is there: by its first and its last token."""
    return Counter((piece[0], piece[-1]) for sample in samples for piece in sample)


def whole(first=0, last=None):
    """What the sequences are to have: documents of two tokens at least; of longer ones, parts that overlap by the token
    that is the last target of one and the first input of the next."""
    if last is None:
        last = ENDS[-1]
    expected = Counter()
    for begin, end in zip(ENDS - LENGTHS, ENDS, strict=True):
        last_token = min(end, last) - 1
        for start in range(max(begin, first), last_token, SEQ):
            expected[start, min(start + SEQ, last_token)] += 1
    return expected


def test_an_epoch_has_every_document_once_and_whole(text):
    tokens = packed(text)
    orders = []
    for epoch in (0, 1):
        samples = samples_of(tokens, epoch)
        assert counted(samples) == whole()
        # A sample by the first token of its first document.
        orders.append([first[0] for first, *_ in samples])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert orders[1] != sorted(orders[1])
    # The rest is padding. Of a document of n tokens n - 1 are inputs.
    inputs = sum(len(piece) - 1 for sample in samples for piece in sample)
    assert inputs / (tokens.samples * SEQ) > 0.75


def test_training_and_validation_share_no_target(text):
    train, validation = text.split()
    in_train = samples_of(packed(train, shuffle=False))
    assert counted(in_train) == whole(0, train.end)
    in_validation = samples_of(packed(validation, shuffle=False))
    assert counted(in_validation) == whole(train.end, None)


def test_a_size_that_does_not_fit_begins_the_next_bin():
    # 9 and 7 fill a bin of 16; none of the others fits to the one before.
    sizes = np.array([9, 7, 1, 16, 15, 2])
    assert firsts_in_order(sizes, 16).tolist() == [0, 2, 3, 4, 5, 6]
    nothing = np.array([], np.int64)
    assert firsts_in_order(nothing, 16).tolist() == [0]
    sizes = np.random.RandomState(1).randint(1, 17, 2000)
    firsts = firsts_in_order(sizes, 16)
    bins = np.split(sizes, firsts[1:-1])
    assert max(map(sum, bins)) == 16
    for one, following in itertools.pairwise(bins):
        assert sum(one) + following[0] > 16


def test_sequences_have_neighbouring_documents_in_order(text):
    samples = samples_of(packed(text, shuffle=False))
    first_tokens = [piece[0] for sample in samples for piece in sample]
    assert first_tokens == sorted(first_tokens)


def test_documents_without_tokens(text):
    # Each seventh document has two empty ones after it.
    ends = np.sort(np.concatenate((ENDS, ENDS[::7], ENDS[::7])))
    tokens = packed(text, ends)
    for place in range(30):
        # Inputs, targets and starts.
        assert tokens.sample(0, place).shape == (3, SEQ)
    assert counted(samples_of(tokens)) == whole()


def test_a_batch_is_a_function_of_seed_and_step(text):
    after_others = packed(text, seed=3)
    for step in range(20):
        after_others.batch(step, 8, 0, 8)
    full = packed(text, seed=3).batch(20, 8, 0, 8)
    parts = [after_others.batch(20, 8, first, 2) for first in range(0, 8, 2)]
    for field in ("inputs", "targets", "documents.start_of_token"):
        get = operator.attrgetter(field)
        assert get(full).shape == (8, SEQ)
        assert torch.equal(torch.cat([get(batch) for batch in parts]), get(full))
    assert full.has_padding
    of_another_seed = packed(text, seed=4).batch(20, 8, 0, 8)
    assert not torch.equal(of_another_seed.inputs, full.inputs)
    # Their tensors move with the batch.
    moved = full.to(torch.device("cpu"))
    assert all(map(torch.equal, moved.documents, full.documents))


def refused(folder, message, **flags):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)) as caught:
        open_sources([folder], token_dtype="uint16").tokens(SEQ, 0, 256, **flags)
    assert "\n" not in str(caught.value)


def test_texts_that_do_not_say_where_documents_end(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("some text " * 99)
    tokens = tmp_path / "a.bin"
    np.arange(100, dtype="<u2").tofile(tokens)
    for path in (plain, tokens):
        refused(path, f"--pack: {path} does not say where documents end", pack=True)
        refused(path, "--document_mask", document_mask=True)
    with pytest.raises(ConfigError, match="standard library does not say where documents end"):
        open_sources().tokens(SEQ, 0, 256, pack=True)


def test_refused(text, tmp_path):
    # Each token is a document.
    with pytest.raises(DataError, match="none of its 3265 documents has two tokens"):
        packed(text, TOKENS + 1)
    with pytest.raises(DataError, match="token 3265"):
        packed(text, ENDS[:-1])
    exchanged = np.concatenate((ENDS[:50], ENDS[[51, 50]], ENDS[52:]))
    # As a file is whose middle was never written.
    zeros = np.concatenate((ENDS[:1], np.zeros(len(ENDS) - 2, np.int64), ENDS[-1:]))
    for ends in (exchanged, zeros):
        with pytest.raises(DataError, match="the ends of its documents are not in order"):
            packed(text, ends)
    with pytest.raises(DataError, match=r"token \d+, and the model's vocabulary ends at 9"):
        packed(text, vocab_size=10)
    largest = len(TOKENS) - 1
    with pytest.raises(DataError, match=rf"{largest}"):
        packed(text, vocab_size=largest, shuffle=False)
    packed(text, vocab_size=largest + 1, shuffle=False)
    with pytest.raises(DataError, match=r"the data has \d+ sequences of 16 tokens, fewer than one global batch"):
        packed(text).steps_per_epoch(1000)


def test_a_folder_whose_documents_are_truncated(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one,two,three," * 40)
    folder = tmp_path / "out"
    prepare(Preparation((path,), folder, separator=","), 1)
    train, validation = open_sources([folder]).tokens(SEQ, 0, 256, pack=True, document_mask=True)
    batch = train.batch(0, 4, 0, 4)
    assert batch.documents.start_of_token.shape == (4, SEQ)
    assert validation.samples > 0
    # The last end is 8 bytes.
    documents = folder / "documents.bin"
    documents.write_bytes(documents.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"documents\.bin is not of"):
        open_tokens(folder)
