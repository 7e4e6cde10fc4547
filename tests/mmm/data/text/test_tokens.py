"""Batches of tokens: the same global batch whatever the mesh, every stretch of text once an epoch. --dataset
shakespeare: downloaded once, checked, split as any text; without it, --text is named as the way."""

import hashlib
import os

import numpy as np
import pytest
import torch

import mmm.data.text.shakespeare as module
from mmm.data.text.corpus import read_text_files, standard_library
from mmm.data.text.shakespeare import shakespeare
from mmm.data.text.tokens import RandomTokens, TextTokens
from mmm.errors import ConfigError, DataError
from mmm.trainer.config import Text
from mmm.trainer.load_text import load_text, open_text

TEXT = np.arange(1000, dtype=np.uint32).astype(np.uint8)


@pytest.mark.parametrize("tokens", [TextTokens(TEXT, 16, 3), RandomTokens(50, 16, 3)], ids=["text", "random"])
@pytest.mark.parametrize("dp", [2, 4])
def test_parts_make_the_global_batch(tokens, dp):
    global_batch = tokens.batch(2, 8, 0, 8)
    parts = [tokens.batch(2, 8, c * 8 // dp, 8 // dp) for c in range(dp)]
    assert torch.equal(torch.cat([p.inputs for p in parts]), global_batch.inputs)
    assert torch.equal(torch.cat([p.targets for p in parts]), global_batch.targets)
    assert {p.count for p in parts} == {global_batch.count} == {8 * 16}
    assert torch.equal(global_batch.inputs[:, 1:], global_batch.targets[:, :-1])


def test_an_epoch_has_every_stretch_once():
    text = np.concatenate([np.full(16, i, dtype=np.uint8) for i in range(25)])[: 24 * 16 + 1]
    tokens = TextTokens(text, 16, seed=0)
    steps = tokens.steps_per_epoch(8)
    assert (tokens.samples, steps) == (24, 3)
    orders = []
    for epoch in range(2):
        batches = [tokens.batch(epoch * steps + s, 8, 0, 8).inputs[:, 0] for s in range(steps)]
        orders.append(torch.cat(batches).tolist())
        assert sorted(orders[-1]) == list(range(24))
    assert orders[0] != orders[1] != sorted(orders[1])


def test_standard_library_is_split_by_file():
    corpus = standard_library()
    assert corpus.files > 100
    assert 0.02 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.3
    assert corpus.sha256 == hashlib.sha256(corpus.train.tobytes() + corpus.validation.tobytes()).hexdigest()
    assert corpus == corpus or corpus.sha256 == standard_library().sha256
    first_of_validation = bytes(corpus.validation[:200])
    assert first_of_validation not in bytes(corpus.train)


def test_a_new_file_does_not_move_the_split(tmp_path):
    for i in range(30):
        (tmp_path / f"m{i}.py").write_text(f"# {i}\n")
    before = bytes(standard_library(tmp_path).validation)
    (tmp_path / "a_new_module.py").write_text("# new\n")
    after = standard_library(tmp_path)
    assert bytes(after.validation) in (before, b"# new\n\n" + before)


def test_files_as_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "b.txt").write_bytes(bytes(range(1, 201)))
    corpus = read_text_files([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert bytes(corpus.validation) == b"a" * 10 + b"\n" + bytes(range(181, 201))
    assert len(corpus.train) == 90 + 1 + 180


def test_files_that_are_none(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"text\0")
    os.mkfifo(tmp_path / "fifo")
    reasons = {
        "missing": "No such file",
        "empty": "is empty",
        ".": "is not a regular file",
        "binary": "binary: byte 4 is NUL",
    }
    reasons |= {"fifo": "--text .*fifo: it is not a regular file"}
    for path, message in reasons.items():
        with pytest.raises(DataError, match=message):
            read_text_files([tmp_path / path])


def test_too_little_text():
    with pytest.raises(DataError, match="--seq_length 16"):
        TextTokens(TEXT[:10], 16, 0)
    with pytest.raises(DataError, match=r"62 sequences"):
        TextTokens(TEXT, 16, 0).steps_per_epoch(64)


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
    for options, message in (
        (Text(dataset="shakespeare", text=(offered,)), "--text and --dataset shakespeare contradict"),
        (Text(text=(offered,), token_dtype="uint16"), "--token_dtype uint16"),
        (Text(dataset="random", text=(offered,)), "--text and --dataset random contradict"),
        (Text(dataset="random", tokenizer="chars"), "--tokenizer and --dataset random contradict"),
    ):
        with pytest.raises(ConfigError, match=message):
            options.check()
