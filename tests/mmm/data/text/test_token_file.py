"""Token files: of mmm tokens, of nanoGPT, of Megatron; opened at once, read in small parts; and broken ones."""

import gzip
import json
import os
import struct

import numpy as np
import pytest
import torch

from mmm.data import FileTokens
from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.sources import open_sources
from mmm.data.text.token_file import open_tokens
from mmm.errors import DataError

TOKENS = np.arange(1000, 2000)


def folder_of(folder, tokens, documents, dtype="<u2", count=None, **changes):
    folder.mkdir()
    np.asarray(tokens, dtype).tofile(folder / "tokens.bin")
    np.asarray(documents, "<i8").tofile(folder / "documents.bin")
    manifest = {
        "format": 1,
        "dtype": dtype,
        "tokens": count or len(tokens),
        "documents": len(documents),
        "tokenizer": {"kind": "bytes", "file": "", "sha256": ByteTokenizer().sha256, "vocab_size": 256},
        "sha256": "0" * 64,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


def megatron(prefix, sequences, documents, code=8, dtype="<u2", magic=b"MMIDIDX\0\0", version=1):
    """As _IndexWriter of Megatron-LM writes it."""
    np.concatenate(sequences).astype(dtype).tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(each) for each in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    head = magic + struct.pack("<QBQQ", version, code, len(sequences), len(documents))
    index = prefix.with_suffix(".idx")
    index.write_bytes(head + lengths.tobytes() + pointers.tobytes() + np.array(documents, "<i8").tobytes())
    return index


def all_tokens(corpus):
    return np.concatenate([corpus.train[:], corpus.validation[:]])


def test_nanogpt(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "data.bin")
    corpus = open_tokens(tmp_path / "data.bin", "uint16")
    assert np.array_equal(all_tokens(corpus), TOKENS)
    assert (len(corpus.train), len(corpus.validation), corpus.tokenizer, corpus.documents) == (900, 100, None, None)
    assert corpus.describe()["tokenizer"] == "unknown"


def test_nanogpt_with_its_validation_text(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "train.bin")
    TOKENS[:50].astype("<u2").tofile(tmp_path / "val.bin")
    corpus = open_tokens(tmp_path / "train.bin", "uint16")
    assert np.array_equal(corpus.train[:], TOKENS)
    assert np.array_equal(corpus.validation[:], TOKENS[:50])
    before = corpus.sha256
    TOKENS[50:100].astype("<u2").tofile(tmp_path / "val.bin")
    assert open_tokens(tmp_path / "train.bin", "uint16").sha256 != before
    assert np.array_equal(all_tokens(open_tokens(tmp_path / "val.bin", "uint16")), TOKENS[50:100])


def llmc(path, tokens, dtype="<u2", magic=20240520, version=1, count=None):
    """As write_datafile of llm.c's dev/data/data_common.py writes it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_llmc(tmp_path, magic, version, dtype):
    tokens = TOKENS * 100 % (1 << 17 if dtype == "<u4" else 1 << 16)
    corpus = open_tokens(llmc(tmp_path / "some_train_000001.bin", tokens, dtype, magic, version))
    assert np.array_equal(all_tokens(corpus), tokens)
    assert (len(corpus.train), len(corpus.validation), corpus.tokenizer, corpus.documents) == (900, 100, None, None)
    first, second = FileTokens(corpus.train, 9, 0, shuffle=False), FileTokens(corpus.validation, 9, 0, shuffle=False)
    assert first.sample(0, 0).tolist() == tokens[:10].tolist()
    assert second.sample(0, 0).tolist() == tokens[900:910].tolist()


def test_llmc_with_its_validation_text(tmp_path):
    llmc(tmp_path / "train.bin", TOKENS)
    llmc(tmp_path / "val.bin", TOKENS[:50])
    corpus = open_tokens(tmp_path / "train.bin")
    assert np.array_equal(corpus.train[:], TOKENS)
    assert np.array_equal(corpus.validation[:], TOKENS[:50])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: llmc(path, TOKENS, count=1001), "says 1001"),
        (lambda path: llmc(path, TOKENS, count=999), "says 999"),
        (lambda path: path.write_bytes(llmc(path, TOKENS).read_bytes()[:100]), "tokens, and its header says 1000"),
        (lambda path: TOKENS.astype("<i4").tofile(path), "--token_dtype"),
        (lambda path: np.save(path.open("wb"), TOKENS.astype("<u2")), "NumPy"),
        (lambda path: np.savez(path.open("wb"), TOKENS.astype("<u2")), "is a zip archive"),
        (lambda path: torch.save(torch.ones(3), path), "NumPy's"),
        (lambda path: path.write_bytes(gzip.compress(TOKENS.astype("<u2").tobytes())), "is gzip, by its first bytes"),
        (lambda path: path.write_bytes(b"PAR1" * 9), "is Parquet"),
        (lambda path: path.write_bytes(b"GGUF" * 9), "is GGUF"),
        (lambda path: megatron(path, [TOKENS], [0, 1]).rename(path), "is an index of Megatron's"),
    ],
)  # fmt: skip
def test_a_bin_that_is_of_another_format(tmp_path, write, words):
    write(tmp_path / "train.bin")
    with pytest.raises(DataError) as caught:
        open_tokens(tmp_path / "train.bin")
    assert words in str(caught.value)
    assert "train.bin" in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_bin_without_a_header_has_the_type_that_is_said(tmp_path, dtype):
    tokens = TOKENS % 256
    tokens.astype(dtype).tofile(tmp_path / "data.bin")
    assert np.array_equal(all_tokens(open_tokens(tmp_path / "data.bin", dtype)), tokens)


def test_a_header_counts_and_not_another_type_that_is_said(tmp_path):
    path = llmc(tmp_path / "data.bin", TOKENS)
    assert np.array_equal(all_tokens(open_tokens(path, "uint16")), TOKENS)
    with pytest.raises(DataError, match=r"--token_dtype is uint32, and its header says uint16"):
        open_tokens(path, "uint32")


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron(tmp_path, code, dtype):
    tokens = TOKENS % 256 if dtype == "u1" else TOKENS
    sequences = [tokens[:10], tokens[10:400], tokens[400:401], tokens[401:]]
    index = megatron(tmp_path / "some_document", sequences, [0, 2, 3, 4], code, dtype)
    for path in (index, index.with_suffix(".bin"), tmp_path / "some_document"):
        corpus = open_tokens(path)
        assert np.array_equal(all_tokens(corpus), tokens)
        assert corpus.documents()[:].tolist() == [400, 401, 1000]
    digest = corpus.sha256
    megatron(tmp_path / "some_document", sequences, [0, 4], code, dtype)
    assert open_tokens(index).sha256 != digest


@pytest.mark.parametrize("ends", [[100, 1001], [100], [900, 100, 1000], []])
def test_a_folder_with_documents_that_are_not_there(tmp_path, ends):
    folder = folder_of(tmp_path / "dir", TOKENS % 256, ends, "|u1")
    with pytest.raises(DataError, match=r"documents"):
        open_sources([folder]).tokens(16, 0, 1 << 20, pack=True)


def test_a_folder(tmp_path):
    corpus = open_tokens(folder_of(tmp_path / "dir", TOKENS % 256, [10, 1000], "|u1"))
    assert np.array_equal(all_tokens(corpus), TOKENS % 256)
    assert (corpus.documents()[:].tolist(), corpus.sha256) == ([10, 1000], "0" * 64)
    assert corpus.tokenizer.kind == "bytes"


def broken(tmp_path, name):
    path = tmp_path / name
    if name == "odd.bin":
        path.write_bytes(b"abc")
    elif name == "empty.bin":
        path.touch()
    elif name == "unfinished":
        path.mkdir()
    elif name == "json":
        (folder_of(path, TOKENS, [1000]) / "manifest.json").write_text("{")
    elif name == "other":
        (folder_of(path, TOKENS, [1000]) / "manifest.json").write_text("[]")
    elif name == "newer":
        folder_of(path, TOKENS, [1000], format=2)
    elif name == "short":
        (folder_of(path, TOKENS, [1000]) / "tokens.bin").write_bytes(b"ab")
    elif name in ("floats", "elsewhere"):
        about = {"kind": "chars", "file": ["x"], "sha256": "1"}
        folder_of(path, TOKENS, [1000], **({"tokenizer": about} if name == "elsewhere" else {"dtype": "<f4"}))
    elif name == "changed":
        about = {"kind": "bytes", "file": "", "sha256": "1"}
        folder_of(path, TOKENS, [1000], tokenizer=about)
    elif name == "fifo.bin":
        os.mkfifo(path)
    elif name == "fifo":
        (folder_of(path, TOKENS, [1000]) / "documents.bin").unlink()
        os.mkfifo(path / "documents.bin")
    elif name == "none.idx":
        megatron(path, [TOKENS], [])
    elif name == "text.idx":
        path.write_text("text " * 10)
    elif name == "v2.idx":
        megatron(path, [TOKENS], [0, 1], version=2)
    elif name == "float.idx":
        megatron(path, [TOKENS], [0, 1], code=7)
    elif name == "cut.idx":
        megatron(path, [TOKENS], [0, 1]).write_bytes(path.read_bytes()[:40])
    elif name == "binless.idx":
        megatron(path, [TOKENS], [0, 1]).with_suffix(".bin").unlink()
    elif name == "shorter.idx":
        megatron(path, [TOKENS], [0, 1]).with_suffix(".bin").write_bytes(b"ab")
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.bin", "No such file"),
        ("odd.bin", "odd.bin"),
        ("empty.bin", "empty.bin has no header"),
        ("unfinished", "manifest.json"),
        ("json", "manifest.json"),
        ("other", "manifest.json"),
        ("newer", "format 2"),
        ("short", "tokens.bin"),
        ("changed", "is not the tokenizer that made"),
        ("floats", "manifest.json is damaged"),
        ("elsewhere", "manifest.json is damaged"),
        ("fifo.bin", "fifo.bin: it is no regular file"),
        ("fifo", "documents.bin: it is no regular file"),
        ("none.idx", "1 sequences and 0 ends"),
        ("text.idx", "MMIDIDX"),
        ("v2.idx", "version 1"),
        ("float.idx", "type 7"),
        ("cut.idx", "need 62"),
        ("binless.idx", "binless.bin: No such file"),
        ("shorter.idx", "index 1000"),
    ],
)
def test_what_is_broken(tmp_path, name, words):
    with pytest.raises(DataError) as caught:
        open_tokens(broken(tmp_path, name))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
