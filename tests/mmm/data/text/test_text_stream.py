"""Text of tokens that come one after the other: what comes, joined, is the text of all."""

import random

import pytest

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.text_stream import TextStream
from mmm.data.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer
from support.llamas import byte_bpe, sentencepiece_model

TEXT = "Größe 😀: to be,  or not\n— 𝄞"


def streamed(tokenizer, tokens):
    stream = TextStream(tokenizer)
    return [*(stream.add([token]) for token in tokens), stream.add([], last=True)]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_character_comes_when_it_is_complete(kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(byte_bpe(), "made up")
    parts = streamed(tokenizer, tokenizer.encode(TEXT.encode()).tolist())
    assert [piece for piece in parts if piece] == list(TEXT)
    assert parts[parts.index("😀") - 3 : parts.index("😀")] == ["", "", ""]


def test_bytes_that_are_no_text():
    random.seed(0)
    for _ in range(200):
        tokens = random.choices([*b"ab\xe2\x82\xac\xff\xf0\x9f\x98\x80\xc3\xb6"], k=random.randrange(12))
        assert "".join(streamed(ByteTokenizer(), tokens)) == ByteTokenizer().decode(tokens)
    assert streamed(ByteTokenizer(), b"a\xff") == ["a", "", "\ufffd"]


def test_spaces_between_the_words_of_a_sentencepiece_model():
    lines = ["to be, or not to be", "that is the question"] * 20
    tokenizer = SentencePieceTokenizer(sentencepiece_model(lines, vocab_size=290, byte_fallback=True), "made up")
    parts = streamed(tokenizer, tokenizer.encode("to be 😀 or not to be".encode()).tolist())
    assert "".join(parts) == "to be 😀 or not to be"
    assert "😀" in parts
