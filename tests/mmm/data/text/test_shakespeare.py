"""--dataset shakespeare: downloaded once, checked, split as any text; without it, --text is named as the way."""

import hashlib

import pytest

import mmm.data.text.shakespeare as module
from mmm.data import read_text_files
from mmm.data.text.shakespeare import shakespeare
from mmm.errors import ConfigError
from mmm.trainer.config import Text
from mmm.trainer.load_text import load_text, open_text

PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 100


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """The file's address, of a play that stands in; the cache is empty."""
    monkeypatch.setenv("MMM_DATA", str(tmp_path / "cache"))
    (tmp_path / "play.txt").write_bytes(PLAY)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(PLAY).hexdigest())
    monkeypatch.setattr(module, "URL", (tmp_path / "play.txt").as_uri())
    return tmp_path / "play.txt"


def test_fetched_once(offered, tmp_path):
    path = shakespeare()
    assert path == tmp_path / "cache" / "shakespeare" / "input.txt"
    assert path.read_bytes() == PLAY
    offered.unlink()
    assert shakespeare() == path


def test_what_it_is_as_data(offered):
    options = Text(dataset="shakespeare", seq_length=32)
    sources, text = open_text(options), read_text_files([offered])
    data = load_text(options, sources, sources.vocab_size, 0)
    assert data.describe()["dataset"] == "shakespeare"
    assert data.describe()["sha256"] == text.sha256
    assert data.train.samples == (len(text.train) - 1) // 32
    chars = Text(dataset="shakespeare", tokenizer="chars")
    assert open_text(chars).vocab_size == len(set(PLAY))


def test_contradictions(offered):
    for options, words in (
        (Text(dataset="shakespeare", text=(offered,)), "--text and --dataset shakespeare contradict"),
        (Text(text=(offered,), token_dtype="uint16"), "--token_dtype uint16"),
        (Text(dataset="random", text=(offered,)), "--text and --dataset random contradict"),
        (Text(dataset="random", tokenizer="chars"), "--tokenizer and --dataset random contradict"),
    ):
        with pytest.raises(ConfigError, match=words):
            options.check()
