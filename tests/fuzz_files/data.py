"""Files of tokens, texts and images, and what `mmm tokens` leaves beside them."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fuzz_files.kinds import Kind
from fuzz_files.weights import TEXT
from mmm.data.images.datasets import load_images
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.sources import open_sources
from mmm.data.text.tokenizer import CharTokenizer
from support.llamas import byte_bpe
from support.published import expected_cifar, write_cifar

# A text of tokens beyond a byte.
TOKENS = np.arange(200, 600)
ENDS = [100, 150, 400]
NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
# What the processes that encode a text send back.
FROM_WORKERS = (
    "concurrent.futures.process._ResultItem",
    "concurrent.futures.process._rebuild_exc",
    "concurrent.futures.process._RemoteTraceback",
    "concurrent.futures.process._ExceptionWithTraceback",
    "mmm.data.text.encode.Encoded",
    *NUMPY,
    "mmm.errors.DataError",
)


# --- tokens --------------------------------------------------------------------------------------------------------


def make_tokens(folder: Path) -> None:
    made = folder / "tokens"
    made.mkdir()
    (made / "tokens.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    (made / "documents.bin").write_bytes(np.array(ENDS, "<i8").tobytes())
    tokenizer = CharTokenizer("".join(map(chr, range(32, 700))))
    (made / "tokenizer.json").write_bytes(tokenizer.content)
    about = {"kind": tokenizer.kind, "file": tokenizer.file, "sha256": tokenizer.sha256, "vocab_size": 668, "eos": None}
    manifest = {"format": 1, "dtype": "<u2", "tokens": len(TOKENS), "documents": len(ENDS), "bytes": 800}
    manifest |= {"tokenizer": about, "files": ["text"], "sha256": "0" * 64, "key": "0" * 64}
    (made / "manifest.json").write_text(json.dumps(manifest, indent=1))


def make_nanogpt(folder: Path) -> None:
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(TOKENS.astype("<u2").tobytes())


def make_llmc(folder: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(TOKENS)
    (folder / "train.bin").write_bytes(header.tobytes() + TOKENS.astype("<u2").tobytes())


def make_megatron(folder: Path) -> None:
    lengths = np.array([100, 50, 250], "<i4")
    starts = np.array([0, 200, 300], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    documents = np.array([0, 1, 2, 3], "<i8")
    (folder / "train.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())
    (folder / "train.bin").write_bytes(TOKENS.astype("<u2").tobytes())


def _read_tokens(name: str, token_dtype: str | None = None) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        path = folder / name
        sources = open_sources([path], token_dtype=token_dtype)
        corpus = sources.corpus
        print(sources.corpus.describe())
        ends = None if corpus.documents is None else corpus.documents()[:]
        packed = corpus.documents is not None
        for mask in {False, packed}:
            train, _ = sources.tokens(8, 0, 1 << 20, pack=mask, document_mask=mask)
            train.batch(0, 4, 0, 4)
        return np.concatenate([corpus.train[:], corpus.validation[:]]), ends

    return read


# --- mmm tokens ----------------------------------------------------------------------------------------------------


def make_text(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT + "Grüße, 你好\n")


def make_lines(folder: Path) -> None:
    rows = [{"text": "one"}, {"text": "two Grüße", "id": 3}, {"text": ""}, {"text": "three"}]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_text(folder: Path) -> Any:
    text = open_sources([folder / "text.txt"]).corpus
    return text.train[:].tobytes() + text.validation[:].tobytes()


def make_chats(folder: Path) -> None:
    turns = [("system", "short"), ("user", "one?"), ("assistant", "Grüße"), ("user", "two?"), ("assistant", "2")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns[:end]]} for end in (3, 5)]
    (folder / "chats.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in (*rows, {"prompt": "3?", "answer": "3"}))
    )


def read_chats(folder: Path) -> Any:
    (folder / "tokenizer.json").write_bytes(byte_bpe(("<s>",)))
    sources = open_sources([folder / "chats.jsonl"], str(folder / "tokenizer.json"))
    corpus = sources.corpus
    print(sources.corpus.describe(), sources.notes(64))
    for pack in (False, True):
        sources.tokens(64, 0, 257, pack=pack)[0].sample(0, 0)
    chats = (*corpus.train.chats, *corpus.validation.chats)
    return [np.concatenate(arrays) for arrays in zip(*chats, strict=True)]


# Every kind of file of the data room: how it is made, and how it is read.
KINDS = (
    Kind("tokens-folder", make_tokens, ("tokens/*",), _read_tokens("tokens"), sparse=True),
    Kind("tokens-nanogpt", make_nanogpt, ("*.bin",), _read_tokens("train.bin", "uint16")),
    Kind("tokens-llmc", make_llmc, ("*.bin",), _read_tokens("train.bin")),
    Kind("tokens-megatron", make_megatron, ("train.*",), _read_tokens("train.idx")),
    Kind("text", make_text, ("text.txt",), read_text),
    Kind(
        "text-json-lines",
        make_lines,
        ("text.jsonl",),
        lambda folder: prepare(Preparation((folder / "text.jsonl",), folder / "made"), 1),
        unpickles=FROM_WORKERS,
    ),
    Kind("text-chats", make_chats, ("chats.jsonl",), read_chats),
)


def _read_images(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        data = load_images(name, folder, image_size=8 if name == "folder" else None)
        print(data.describe())
        every = [dataset.images(range(dataset.samples)) for dataset in (data.train, data.test)]
        return data, [dataset.pixels(range(dataset.samples)).numpy() for dataset in (data.train, data.test)], every

    return read


def make_cifar(folder: Path) -> None:
    write_cifar(folder / "cifar-10-batches-py", 4)


def read_cifar(folder: Path) -> Any:
    with mock.patch.multiple(import_torchvision("datasets").CIFAR10, **_expected()):
        return _read_images("cifar10")(folder)


@cache
def _expected() -> dict[str, Any]:
    """Names and sums of the files that `write_cifar` writes: the same each time."""
    with tempfile.TemporaryDirectory() as folder:
        write_cifar(Path(folder) / "c", 4)
        return expected_cifar(Path(folder) / "c")


def make_images(folder: Path) -> None:
    from PIL import Image

    rng = np.random.RandomState(0)
    for label, suffixes in (("cat", ("png", "jpg", "bmp", "ppm")), ("dog", ("png", "tiff", "webp", "jpg"))):
        (folder / label).mkdir()
        for index, suffix in enumerate(suffixes):
            image = Image.fromarray(rng.randint(0, 256, (12, 10, 3)).astype(np.uint8))
            image.save(folder / label / f"{index}.{suffix}")


KINDS += (
    Kind("images-cifar", make_cifar, ("*/*",), read_cifar, unpickles=NUMPY),
    Kind("images-folder", make_images, ("*/*",), _read_images("folder")),
)
