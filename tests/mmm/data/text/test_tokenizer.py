"""Tokenizers: there and back, the same in another process, and what is refused."""

import io
import sys

import numpy as np
import pytest

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError

TEXT = "Größe: to be, or not to be — that is the question 😀\n" * 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text").write_text(TEXT)
    (folder / "bpe.json").write_bytes(train_bpe(iter(TEXT.splitlines(keepends=True)), 300, "<|endoftext|>"))
    (folder / "chars.json").write_bytes(CharTokenizer.of([TEXT.encode()]).content)
    model = io.BytesIO()
    lines = iter(TEXT.splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    (folder / "sp.model").write_bytes(model.getvalue())
    return folder


@pytest.mark.parametrize("name", ["bytes", "chars.json", "bpe.json", "sp.model"])
def test_there_and_back(files, name):
    tokenizer = load_tokenizer(name if name == "bytes" else files / name)
    tokens = tokenizer.encode(TEXT.encode())
    assert tokens.dtype == tokenizer.dtype == (np.uint16 if tokenizer.vocab_size > 256 else np.uint8)
    assert tokens.max() < tokenizer.vocab_size
    # SentencePiece takes a line's end, and spaces beside it, for a space.
    expected = TEXT.strip().replace("\n", " ") if name == "sp.model" else TEXT
    assert tokenizer.decode(tokens.tolist()) == expected
    again = load_tokenizer(name if name == "bytes" else files / name)
    assert again.sha256 == tokenizer.sha256
    assert np.array_equal(again.encode(TEXT.encode()), tokens)


def test_bytes_are_the_bytes():
    assert bytes(ByteTokenizer().encode(b"\xff\x00a")) == b"\xff\x00a"
    assert ByteTokenizer().decode([0xFF, 97]) == "\ufffda"


def test_special_tokens(files):
    assert load_tokenizer(files / "bpe.json").token("<|endoftext|>") == 0
    assert load_tokenizer(files / "sp.model").token("</s>") == 2
    for name in ("bpe.json", "sp.model", "chars.json"):
        with pytest.raises(ConfigError, match="has no token '<nothing>'"):
            load_tokenizer(files / name).token("<nothing>")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.json", None, "No such file or directory; give bytes, chars or a file"),
        ("broken.json", b'{"model": ', "is no JSON"),
        ("other.json", b'{"model": 1}', "is no tokenizer of the package tokenizers"),
        ("none.json", b'{"kind": "chars"}', "is damaged: it has no chars"),
        ("twice.json", b'{"kind": "chars", "chars": "aba"}', "a text of different characters"),
        ("other.model", b"text", r"\(4 bytes\) is no SentencePiece model"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "package"), [("bpe.json", "tokenizers"), ("sp.model", "sentencepiece")])
def test_a_package_that_is_not_installed(files, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package}"):
        load_tokenizer(files / name)


def test_a_text_is_neither_cut_nor_padded(files):
    """Files of Hugging Face's often say how inputs of another program are cut."""
    tokenizers = pytest.importorskip("tokenizers")
    plain = load_tokenizer(files / "bpe.json")
    asking = tokenizers.Tokenizer.from_file(str(files / "bpe.json"))
    asking.enable_truncation(16)
    asking.enable_padding(length=10_000)
    asking.save(str(files / "asking.json"))
    text = b"to be or not to be, that is the question " * 20
    assert load_tokenizer(files / "asking.json").encode(text).tolist() == plain.encode(text).tolist()
