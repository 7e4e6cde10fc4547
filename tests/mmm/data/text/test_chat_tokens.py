"""Conversations as samples: loss on answers alone, each once an epoch, the same for whichever rank asks; none is cut in
silence."""

from pathlib import Path

import numpy as np
import pytest

from mmm.data.text.chat_tokens import ChatText, ChatTokens
from mmm.data.text.chats import ChatArrays
from mmm.errors import DataError
from mmm.layout import PADDING

SEQ = 16


def chat(number, questions, answers):
    """Tokens of which the number of the conversation is the hundreds; a question, then an answer."""
    tokens = 100 * number + np.arange(questions + answers)
    return ChatArrays(tokens, np.arange(questions + answers) >= questions)


@pytest.fixture(scope="module")
def text():
    lengths = np.random.RandomState(0).randint(1, 8, (30, 2))
    return ChatText(Path("a.jsonl"), [chat(n, *length) for n, length in enumerate(lengths, start=1)])


def parts(row):
    """The conversations of a sample: number → (inputs, targets)."""
    found = {}
    for token, target in zip(*row[:2], strict=True):
        if token:
            found.setdefault(int(token) // 100, []).append((int(token), int(target)))
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_has_each_once_with_the_targets_of_its_answer(text, pack):
    tokens = ChatTokens(text, SEQ, 3, vocab_size=10_000, pack=pack, document_starts=pack)
    orders = []
    for epoch in (0, 1):
        rows = [tokens.sample(epoch, place) for place in range(tokens.samples)]
        orders.append([next(iter(parts(row))) for row in rows])
        found = [pair for row in rows for pair in parts(row).items()]
        assert sorted(number for number, _ in found) == list(range(1, 31))
        for number, pairs in found:
            ids, answers = text.chats[number - 1]
            expected = np.where(answers[1:], ids[1:], PADDING)
            assert pairs == list(zip(ids[:-1].tolist(), expected.tolist(), strict=True))
        assert all((row[1][row[0] == 0] == PADDING).all() for row in rows)
    assert orders[0] != orders[1]
    if pack:
        assert tokens.samples < 30 * 0.8


def test_longer_ones_are_cut_and_said():
    text = ChatText(Path("a.jsonl"), [chat(1, 4, 4), chat(2, 4, 5), chat(3, 4, 9), chat(4, 9, 2)])
    cut = text.cut(7)  # inputs
    assert [len(each.tokens) for each in cut.chats] == [8, 8, 8]
    said = text.note(7)
    assert said == (
        "4 conversations, 20 of 41 tokens are answers; 3 are longer than --seq_length 7 (the longest 12): what is "
        "beyond is cut; 1 have no answer left, and are left out"
    )
    assert text.note(12) == "4 conversations, 20 of 41 tokens are answers"
    with pytest.raises(DataError, match="--seq_length 3"):
        text.cut(3)


def test_a_token_that_the_vocabulary_lacks(text):
    with pytest.raises(DataError, match=r"a.jsonl"):
        ChatTokens(text, SEQ, 0, vocab_size=3000)
