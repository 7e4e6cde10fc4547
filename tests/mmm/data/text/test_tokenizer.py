"""Tokenizers: there and back, the same in another process, and what is refused."""

import json
import sys

import numpy as np
import pytest
import tokenizers

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError
from support.llamas import sentencepiece_model

TEXT = "Größe: to be, or not to be — that is the question 😀\n" * 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text").write_text(TEXT)
    (folder / "bpe.json").write_bytes(train_bpe(iter(TEXT.splitlines(keepends=True)), 300, "<|endoftext|>"))
    (folder / "chars.json").write_bytes(CharTokenizer.of([TEXT.encode()]).content)
    (folder / "sp.model").write_bytes(sentencepiece_model(TEXT.splitlines(), vocab_size=40))
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
    ("name", "content", "message"),
    [
        ("gone.json", None, "neither bytes nor chars: No such file or directory"),
        ("broken.json", b'{"model": ', "is not JSON"),
        ("other.json", b'{"model": 1}', "is not a tokenizer of the package tokenizers"),
        ("none.json", b'{"kind": "chars"}', "is damaged: .*chars"),
        ("list.json", b'{"kind": "chars", "chars": ["a", "b"]}', "is damaged"),
        ("twice.json", b'{"kind": "chars", "chars": "aba"}', "is damaged: .*twice"),
        ("other.model", b"text", r"\(4 bytes\) is not a SentencePiece model"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_panic_of_the_package_is_an_error_of_the_file(files, tmp_path):
    """What the package raises then is no Exception."""
    fields = json.loads((files / "bpe.json").read_text())
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    fields["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match="is not a tokenizer of the package tokenizers"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("name", "package"), [("bpe.json", "tokenizers"), ("sp.model", "sentencepiece")])
def test_a_package_that_is_not_installed(files, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package}"):
        load_tokenizer(files / name)


def test_what_cuts_or_fills_a_text_is_off_and_what_draws_is_refused(files):
    """Files of Hugging Face's often say how inputs of another program are cut; a dropout is for its training."""
    plain = load_tokenizer(files / "bpe.json")
    asking = tokenizers.Tokenizer.from_file(str(files / "bpe.json"))
    asking.enable_truncation(16)
    asking.enable_padding(length=10_000)
    asking.save(str(files / "asking.json"))
    text = b"to be or not to be, that is the question " * 20
    assert load_tokenizer(files / "asking.json").encode(text).tolist() == plain.encode(text).tolist()
    asking.model.dropout = 0.5
    asking.save(str(files / "asking.json"))
    with pytest.raises(DataError, match=r"asking.json: its model has dropout 0.5"):
        load_tokenizer(files / "asking.json")


def test_characters_without_a_token_are_refused_with_their_number():
    model = tokenizers.models.BPE(vocab={"h": 0, "i": 1, "hi": 2}, merges=[("h", "i")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own = HuggingFaceTokenizer(tokenizer.to_str().encode(), "own.json")
    assert own.encode(b"hi hi\thi").tolist() == [2, 2, 2]
    with pytest.raises(DataError, match="3 of 9 characters"):
        own.encode(b"hi xyz hi")
    with pytest.raises(DataError, match="5 of 12 characters"):
        own.encode(b"hi xyz xhiy ")
    no_other_word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0}))
    with pytest.raises(DataError, match="UNK"):  # what the package itself refuses
        HuggingFaceTokenizer(no_other_word.to_str().encode(), "own.json").encode(b"other")
