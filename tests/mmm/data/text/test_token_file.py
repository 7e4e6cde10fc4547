"""Token files: of mmm tokens, of nanoGPT, of Megatron; opened at once, read in small parts; and broken ones."""

import gzip
import json
import os
import struct
from functools import partial

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
    """A folder as `mmm tokens` makes it; `changes`: entries of its manifest."""
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
    # Where each sequence begins, in bytes.
    firsts = np.cumsum(lengths, dtype="<i8") - lengths
    pointers = firsts * np.dtype(dtype).itemsize
    head = magic + struct.pack("<QBQQ", version, code, len(sequences), len(documents))
    ends = np.array(documents, "<i8")
    index = prefix.with_suffix(".idx")
    index.write_bytes(head + lengths.tobytes() + pointers.tobytes() + ends.tobytes())
    return index


def all_tokens(corpus):
    return np.concatenate([corpus.train[:], corpus.validation[:]])


def nanogpt(path, tokens):
    """No header, so nothing says of which type they are."""
    tokens.astype("<u2").tofile(path)


def assert_tokens_alone(corpus):
    """The last tenth of a single file is for validation; and the file knows neither a tokenizer nor documents."""
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)
    assert corpus.tokenizer is None
    assert corpus.documents is None


def test_nanogpt(tmp_path):
    path = tmp_path / "data.bin"
    nanogpt(path, TOKENS)
    corpus = open_tokens(path, "uint16")
    assert np.array_equal(all_tokens(corpus), TOKENS)
    assert_tokens_alone(corpus)
    assert corpus.describe()["tokenizer"] == "unknown"
    with_validation(tmp_path, nanogpt, "uint16")


def with_validation(folder, write, *token_dtype):
    """Where val.bin lies beside train.bin, it is the text of the validation."""
    train = folder / "train.bin"
    validation = folder / "val.bin"
    write(train, TOKENS)
    write(validation, TOKENS[:50])
    corpus = open_tokens(train, *token_dtype)
    assert np.array_equal(corpus.train[:], TOKENS)
    assert np.array_equal(corpus.validation[:], TOKENS[:50])
    # Another validation is another corpus.
    write(validation, TOKENS[50:100])
    assert open_tokens(train, *token_dtype).sha256 != corpus.sha256
    # By itself it is a file as any other.
    by_itself = open_tokens(validation, *token_dtype)
    assert np.array_equal(all_tokens(by_itself), TOKENS[50:100])


def llmc(path, tokens, dtype="<u2", magic=20240520, version=1, count=None):
    """As write_datafile of llm.c's dev/data/data_common.py writes it."""
    if count is None:
        count = len(tokens)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize(
    ("magic", "version", "in_header", "other", "vocab_size"),
    [
        (20240520, 1, "uint16", "uint32", 1 << 16),
        # Tokens that two bytes do not hold.
        (20240801, 7, "uint32", "uint16", 1 << 17),
    ],
)
def test_llmc(tmp_path, magic, version, in_header, other, vocab_size):
    tokens = TOKENS * 100 % vocab_size
    path = llmc(tmp_path / "some_train_000001.bin", tokens, in_header, magic, version)
    corpus = open_tokens(path)
    assert np.array_equal(all_tokens(corpus), tokens)
    assert np.array_equal(all_tokens(open_tokens(path, in_header)), tokens)
    with pytest.raises(DataError, match=rf"--token_dtype is {other}, and its header says {in_header}"):
        open_tokens(path, other)
    with_validation(tmp_path, llmc)
    assert_tokens_alone(corpus)
    # Sequences of 9 tokens, and the one after them.
    train = FileTokens(corpus.train, 9, 0, shuffle=False)
    validation = FileTokens(corpus.validation, 9, 0, shuffle=False)
    assert train.sample(0, 0).tolist() == tokens[:10].tolist()
    assert validation.sample(0, 0).tolist() == tokens[900:910].tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_bin_without_a_header_has_the_type_that_is_said(tmp_path, dtype):
    path = tmp_path / "data.bin"
    tokens = TOKENS % 256
    tokens.astype(dtype).tofile(path)
    corpus = open_tokens(path, dtype)
    assert np.array_equal(all_tokens(corpus), tokens)


@pytest.mark.parametrize(
    ("code", "dtype", "vocab_size"),
    [
        (1, "u1", 256),
        (8, "<u2", 2000),
        (4, "<i4", 2000),
        (5, "<i8", 2000),
    ],
)
def test_megatron(tmp_path, code, dtype, vocab_size):
    tokens = TOKENS % vocab_size
    prefix = tmp_path / "some_document"
    sequences = [tokens[:10], tokens[10:400], tokens[400:401], tokens[401:]]
    # The first document has two sequences, the others one.
    index = megatron(prefix, sequences, [0, 2, 3, 4], code, dtype)
    for path in (index, index.with_suffix(".bin")):
        corpus = open_tokens(path)
        assert np.array_equal(all_tokens(corpus), tokens)
        assert corpus.documents()[:].tolist() == [400, 401, 1000]
    digest = corpus.sha256
    # The same tokens as one document.
    megatron(prefix, sequences, [0, 4], code, dtype)
    assert open_tokens(index).sha256 != digest


@pytest.mark.parametrize("ends", [[100, 1001], [100], [900, 100, 1000], []])
def test_a_folder_with_documents_that_are_not_there(tmp_path, ends):
    folder = folder_of(tmp_path / "dir", TOKENS % 256, ends, "|u1")
    with pytest.raises(DataError, match=r"documents"):
        open_sources([folder]).tokens(16, 0, 1 << 20, pack=True)


def test_a_folder(tmp_path):
    tokens = TOKENS % 256
    folder = folder_of(tmp_path / "dir", tokens, [10, 1000], "|u1")
    corpus = open_tokens(folder)
    assert np.array_equal(all_tokens(corpus), tokens)
    assert corpus.documents()[:].tolist() == [10, 1000]
    # What its manifest says, so that opening does not read all tokens.
    assert corpus.sha256 == "0" * 64
    assert corpus.tokenizer.kind == "bytes"


def mmm(path, **changes):
    return folder_of(path, TOKENS, [1000], **changes)


def manifest(path, text):
    (mmm(path) / "manifest.json").write_text(text)


def numpy_file(save, path):
    """`save`: np.save or np.savez. Both would add their own suffix to a path."""
    with path.open("wb") as file:
        save(file, TOKENS.astype("<u2"))


def cut(path, size=2):
    content = path.read_bytes()
    path.write_bytes(content[:size])


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def megatron_of_one(path, **changes):
    return megatron(path, [TOKENS], [0, 1], **changes)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        # A .bin by itself: of whose tokens nothing says anything, or of another program.
        ("missing.bin", lambda path: None, "No such file"),
        ("odd.bin", lambda path: path.write_bytes(b"abc"), "odd.bin"),
        ("empty.bin", lambda path: path.touch(), "empty.bin has no header"),
        ("fifo.bin", fifo, "fifo.bin: it is not a regular file"),
        ("more.bin", partial(llmc, tokens=TOKENS, count=1001), "says 1001"),
        ("fewer.bin", partial(llmc, tokens=TOKENS, count=999), "says 999"),
        ("cut.bin", lambda path: cut(llmc(path, TOKENS), 100), "tokens, and its header says 1000"),
        ("plain.bin", lambda path: TOKENS.astype("<i4").tofile(path), "--token_dtype"),
        ("numpy.bin", partial(numpy_file, np.save), "NumPy"),
        ("zip.bin", partial(numpy_file, np.savez), "is a zip archive"),
        ("torch.bin", lambda path: torch.save(torch.ones(3), path), "NumPy's"),
        ("gz.bin", lambda path: path.write_bytes(gzip.compress(bytes(99))), "is gzip, by its first bytes"),
        ("parquet.bin", lambda path: path.write_bytes(b"PAR1" * 9), "is Parquet"),
        ("gguf.bin", lambda path: path.write_bytes(b"GGUF" * 9), "is GGUF"),
        ("index.bin", lambda path: megatron_of_one(path).rename(path), "is an index of Megatron's"),
        # A folder as `mmm tokens` makes it.
        ("unfinished", lambda path: path.mkdir(), "manifest.json"),
        ("json", partial(manifest, text="{"), "manifest.json"),
        ("other", partial(manifest, text="[]"), "manifest.json"),
        ("newer", partial(mmm, format=2), "format 2"),
        ("short", lambda path: cut(mmm(path) / "tokens.bin"), "tokens.bin"),
        ("changed", partial(mmm, tokenizer=ABOUT | {"sha256": "1"}), "is not the tokenizer that made"),
        ("floats", partial(mmm, dtype="<f4"), "manifest.json is damaged"),
        ("elsewhere", partial(mmm, tokenizer=ABOUT | {"file": ["x"]}), "manifest.json is damaged"),
        ("nothing", partial(mmm, tokenizer=ABOUT | {"file": []}), "manifest.json is damaged"),
        ("fifo", lambda path: fifo(mmm(path) / "documents.bin"), "documents.bin: it is not a regular file"),
        # An index of Megatron's, of sequences in the .bin next to it.
        ("none.idx", partial(megatron, sequences=[TOKENS], documents=[]), "1 sequences and 0 ends"),
        ("text.idx", lambda path: path.write_text("text " * 10), "MMIDIDX"),
        ("v2.idx", partial(megatron_of_one, version=2), "version 1"),
        ("float.idx", partial(megatron_of_one, code=7), "type 7"),
        ("cut.idx", lambda path: cut(megatron_of_one(path), 40), "need 62"),
        ("binless.idx", lambda path: megatron_of_one(path).with_suffix(".bin").unlink(), "binless.bin: No such file"),
        ("shorter.idx", lambda path: cut(megatron_of_one(path).with_suffix(".bin")), "index 1000"),
    ],
)
def test_what_is_broken(tmp_path, name, write, message):
    path = tmp_path / name
    write(path)
    with pytest.raises(DataError) as caught:
        open_tokens(path)
    text = str(caught.value)
    assert message in text
    assert path.stem in text
    assert "\n" not in text
