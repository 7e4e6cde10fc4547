"""Token files: of mmm tokens, of nanoGPT, of Megatron; opened at once, read in small parts; and broken ones."""

import gzip
import json
import os
import struct

import numpy as np
import pytest
import torch

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.documents import FileTokens
from mmm.data.text.sources import open_sources
from mmm.data.text.token_file import open_tokens
from mmm.errors import DataError

TOKENS = np.arange(1000, 2000)
ABOUT = {"kind": "bytes", "file": "", "sha256": ByteTokenizer().sha256, "vocab_size": 256}


def folder_of(folder, tokens, documents, dtype="<u2", **changes):
    folder.mkdir()
    np.asarray(tokens, dtype).tofile(folder / "tokens.bin")
    np.asarray(documents, "<i8").tofile(folder / "documents.bin")
    manifest = {"format": 1, "dtype": dtype, "tokens": len(tokens), "documents": len(documents)}
    manifest |= {"tokenizer": ABOUT, "sha256": "0" * 64, "bytes": 5000}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


def megatron(prefix, sequences, documents, code=8, dtype="<u2", magic=b"MMIDIDX\0\0", version=1):
    """As _IndexWriter of Megatron-LM writes it."""
    np.concatenate(sequences).astype(dtype).tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
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
    with_validation(tmp_path, lambda path, tokens: tokens.astype("<u2").tofile(path), "uint16")


def with_validation(folder, write, *token_dtype):
    """Where val.bin lies beside train.bin, it is the text of the validation."""
    write(folder / "train.bin", TOKENS)
    write(folder / "val.bin", TOKENS[:50])
    corpus = open_tokens(folder / "train.bin", *token_dtype)
    assert np.array_equal(corpus.train[:], TOKENS)
    assert np.array_equal(corpus.validation[:], TOKENS[:50])
    write(folder / "val.bin", TOKENS[50:100])
    assert open_tokens(folder / "train.bin", *token_dtype).sha256 != corpus.sha256
    assert np.array_equal(all_tokens(open_tokens(folder / "val.bin", *token_dtype)), TOKENS[50:100])


def llmc(path, tokens, dtype="<u2", magic=20240520, version=1, count=None):
    """As write_datafile of llm.c's dev/data/data_common.py writes it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_llmc(tmp_path, magic, version, dtype):
    tokens = TOKENS * 100 % (1 << 17 if dtype == "<u4" else 1 << 16)
    path = llmc(tmp_path / "some_train_000001.bin", tokens, dtype, magic, version)
    corpus = open_tokens(path)
    assert np.array_equal(all_tokens(corpus), tokens)
    in_header, other = ("uint16", "uint32") if dtype == "<u2" else ("uint32", "uint16")
    assert np.array_equal(all_tokens(open_tokens(path, in_header)), tokens)
    with pytest.raises(DataError, match=rf"--token_dtype is {other}, and its header says {in_header}"):
        open_tokens(path, other)
    with_validation(tmp_path, llmc)
    assert (len(corpus.train), len(corpus.validation), corpus.tokenizer, corpus.documents) == (900, 100, None, None)
    first, second = FileTokens(corpus.train, 9, 0, shuffle=False), FileTokens(corpus.validation, 9, 0, shuffle=False)
    assert first.sample(0, 0).tolist() == tokens[:10].tolist()
    assert second.sample(0, 0).tolist() == tokens[900:910].tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_bin_without_a_header_has_the_type_that_is_said(tmp_path, dtype):
    tokens = TOKENS % 256
    tokens.astype(dtype).tofile(tmp_path / "data.bin")
    assert np.array_equal(all_tokens(open_tokens(tmp_path / "data.bin", dtype)), tokens)


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron(tmp_path, code, dtype):
    tokens = TOKENS % 256 if dtype == "u1" else TOKENS
    sequences = [tokens[:10], tokens[10:400], tokens[400:401], tokens[401:]]
    index = megatron(tmp_path / "some_document", sequences, [0, 2, 3, 4], code, dtype)
    for path in (index, index.with_suffix(".bin")):
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


def mmm(path, **changes):
    return folder_of(path, TOKENS, [1000], **changes)


def cut(path, size=2):
    path.write_bytes(path.read_bytes()[:size])


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def megatron_of_one(path, **changes):
    return megatron(path, [TOKENS], [0, 1], **changes)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.bin", lambda path: None, "No such file"),
        ("odd.bin", lambda path: path.write_bytes(b"abc"), "odd.bin"),
        ("empty.bin", lambda path: path.touch(), "empty.bin has no header"),
        ("fifo.bin", fifo, "fifo.bin: it is not a regular file"),
        ("more.bin", lambda path: llmc(path, TOKENS, count=1001), "says 1001"),
        ("fewer.bin", lambda path: llmc(path, TOKENS, count=999), "says 999"),
        ("cut.bin", lambda path: cut(llmc(path, TOKENS), 100), "tokens, and its header says 1000"),
        ("plain.bin", lambda path: TOKENS.astype("<i4").tofile(path), "--token_dtype"),
        ("numpy.bin", lambda path: np.save(path.open("wb"), TOKENS.astype("<u2")), "NumPy"),
        ("zip.bin", lambda path: np.savez(path.open("wb"), TOKENS.astype("<u2")), "is a zip archive"),
        ("torch.bin", lambda path: torch.save(torch.ones(3), path), "NumPy's"),
        ("gz.bin", lambda path: path.write_bytes(gzip.compress(bytes(99))), "is gzip, by its first bytes"),
        ("parquet.bin", lambda path: path.write_bytes(b"PAR1" * 9), "is Parquet"),
        ("gguf.bin", lambda path: path.write_bytes(b"GGUF" * 9), "is GGUF"),
        ("index.bin", lambda path: megatron_of_one(path).rename(path), "is an index of Megatron's"),
        ("unfinished", lambda path: path.mkdir(), "manifest.json"),
        ("json", lambda path: (mmm(path) / "manifest.json").write_text("{"), "manifest.json"),
        ("other", lambda path: (mmm(path) / "manifest.json").write_text("[]"), "manifest.json"),
        ("newer", lambda path: mmm(path, format=2), "format 2"),
        ("short", lambda path: cut(mmm(path) / "tokens.bin"), "tokens.bin"),
        ("changed", lambda path: mmm(path, tokenizer=ABOUT | {"sha256": "1"}), "is not the tokenizer that made"),
        ("floats", lambda path: mmm(path, dtype="<f4"), "manifest.json is damaged"),
        ("elsewhere", lambda path: mmm(path, tokenizer=ABOUT | {"file": ["x"]}), "manifest.json is damaged"),
        ("fifo", lambda path: fifo(mmm(path) / "documents.bin"), "documents.bin: it is not a regular file"),
        ("none.idx", lambda path: megatron(path, [TOKENS], []), "1 sequences and 0 ends"),
        ("text.idx", lambda path: path.write_text("text " * 10), "MMIDIDX"),
        ("v2.idx", lambda path: megatron_of_one(path, version=2), "version 1"),
        ("float.idx", lambda path: megatron_of_one(path, code=7), "type 7"),
        ("cut.idx", lambda path: cut(megatron_of_one(path), 40), "need 62"),
        ("binless.idx", lambda path: megatron_of_one(path).with_suffix(".bin").unlink(), "binless.bin: No such file"),
        ("shorter.idx", lambda path: cut(megatron_of_one(path).with_suffix(".bin")), "index 1000"),
    ],
)
def test_what_is_broken(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(DataError) as caught:
        open_tokens(tmp_path / name)
    assert message in str(caught.value)
    assert name.partition(".")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
