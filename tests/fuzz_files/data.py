"""Files of tokens and texts, and what `mmm tokens` leaves beside them."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from fuzz_files import mutate
from fuzz_files.kinds import Kind, is_small_file
from fuzz_files.weights import TEXT
from mmm.data.text import prepare as preparation
from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.chats import COMPLETIONS
from mmm.data.text.encode import Encoding, _begin, _encode
from mmm.data.text.pieces import read_documents, split
from mmm.data.text.prepare import Preparation
from mmm.data.text.sources import open_sources
from mmm.data.text.tokenizer import CharTokenizer

TOKENS = np.arange(200, 600)
ENDS = [100, 150, 400]


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
    lengths, starts = np.array([100, 50, 250], "<i4"), np.array([0, 200, 300], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    documents = np.array([0, 1, 2, 3], "<i8")
    (folder / "train.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())
    (folder / "train.bin").write_bytes(TOKENS.astype("<u2").tobytes())


def _read_tokens(name: str, token_dtype: str | None = None) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        path = folder / name
        sources = open_sources([path], token_dtype=token_dtype)
        (corpus,) = sources.corpora
        print(sources.describe())
        ends = None if corpus.documents is None else corpus.documents()[:]
        packed = corpus.documents is not None
        for mask in {False, packed}:
            train, _ = sources.tokens(8, 0, 1 << 20, pack=mask, document_mask=mask)
            train.batch(0, 4, 0, 4)
        return np.concatenate([corpus.train[:], corpus.validation[:]]), ends

    return read


def wrong_tokens(folder: Path, found: Any) -> str | None:
    """Of a folder of `mmm tokens`, as its manifest has it."""
    made = next(folder / name for name in ("tokens", "made") if (folder / name).exists())
    manifest = json.loads((made / "manifest.json").read_text())
    return _differ(
        found, np.fromfile(made / "tokens.bin", manifest["dtype"]), np.fromfile(made / "documents.bin", "<i8")
    )


def wrong_nanogpt(folder: Path, found: Any) -> str | None:
    both = [np.fromfile(folder / name, "<u2") for name in ("train.bin", "val.bin") if (folder / name).is_file()]
    return _differ(found, np.concatenate(both), None)


def wrong_llmc(folder: Path, found: Any) -> str | None:
    magic, version, count = np.fromfile(folder / "train.bin", "<i4", 3).tolist()
    kind = {(20240520, 1): "<u2", (20240801, 7): "<u4"}.get((magic, version))
    if kind is None:
        return "accepted a file without a header whose type nobody has said"
    tokens = np.fromfile(folder / "train.bin", kind, offset=1024)
    return _differ(found, tokens, None) or (
        None if len(tokens) == count else "fewer or more tokens than the header says"
    )


def wrong_megatron(folder: Path, found: Any) -> str | None:
    content = (folder / "train.idx").read_bytes()
    _, code, sequences, documents = struct.unpack_from("<QBQQ", content, 9)
    kind = {1: "u1", 2: "i1", 3: "<i4", 4: "<i4", 5: "<i8", 8: "<u2"}[code] if code != 3 else "<i2"
    tokens = np.fromfile(folder / "train.bin", kind)
    starts = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    first = np.frombuffer(content, "<i8", documents, 34 + 12 * sequences)
    if first[0] != 0 or first.min() < 0 or first.max() > sequences:
        return "documents of the index begin with sequences that it has not"
    after = [*(starts // tokens.itemsize), len(tokens)]
    return _differ(found, tokens, np.array([after[number] for number in first[1:]]))


def _differ(found: Any, tokens: np.ndarray, ends: np.ndarray | None) -> str | None:
    if not np.array_equal(found[0], tokens):
        return "tokens are read as others"
    if ends is None:
        return None
    if not np.array_equal(found[1], ends):
        return "ends of documents are read as others"
    right = (np.diff(ends, prepend=0) >= 0).all() and (not len(ends) or ends[-1] <= len(tokens))
    return None if right else "ends of documents are not in order, or after the last token"


def own_ends(name: str, content: bytes, random: Random) -> tuple[bytes, str] | None:
    """A number of an index."""
    if name.endswith(".idx"):
        at, width = random.choice(((9, 8), (17, 1), (18, 8), (26, 8), *((34 + 4 * i, 4) for i in range(19))))
    elif name == "documents.bin":
        at, width = random.choice((0, 8, 16)), 8
    elif name == "train.bin" and content[:2] == struct.pack("<i", 20240520)[:2]:
        at, width = random.choice((0, 4, 8)), 4
    else:
        return None
    return mutate.number(content, at, width, random)


# --- mmm tokens ----------------------------------------------------------------------------------------------------


def make_text(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT + "Grüße, 你好\n")


def make_lines(folder: Path) -> None:
    rows = [{"text": "one"}, {"text": "two Grüße", "id": 3}, {"text": ""}, {"text": "three"}]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_text(folder: Path) -> Any:
    text = open_sources([folder / "text.txt"]).corpora[0]
    return text.train[:].tobytes() + text.validation[:].tobytes()


def wrong_text(folder: Path, found: Any) -> str | None:
    return None if found == (folder / "text.txt").read_bytes() else "another text"


def read_lines(folder: Path) -> Any:
    files = preparation._text_files(Preparation((folder / "text.jsonl",), folder / "made"))
    pieces = split(files, 1 << 24)
    return files[0].jsonl, [each for piece in pieces for each in read_documents(piece, b"", "text", utf8=True)]


def wrong_lines(folder: Path, found: Any) -> str | None:
    if not found[0]:
        return "it is no JSON lines"
    lines = (folder / "text.jsonl").read_text(encoding="utf-8-sig").split("\n")
    texts = [json.loads(line)["text"].encode() for line in lines if line.strip()]
    return None if found[1] == [text for text in texts if text] else "other documents"


def make_chats(folder: Path) -> None:
    turns = [("system", "short"), ("user", "one?"), ("assistant", "Grüße"), ("user", "two?"), ("assistant", "2")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns[:end]]} for end in (3, 5)]
    (folder / "chats.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in (*rows, {"prompt": "3?", "answer": "3"}))
    )


def read_chats(folder: Path) -> Any:
    sources = open_sources([folder / "chats.jsonl"])
    (corpus,) = sources.corpora
    print(sources.describe(), sources.notes(64))
    for pack in (False, True):
        sources.tokens(64, 0, 256, pack=pack)[0].sample(0, 0)
    parts = (corpus.train, corpus.validation)
    return [np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "answers")]


def wrong_chats(folder: Path, found: Any) -> str | None:
    """By the plain template, written here once more."""
    tokens, answers = bytearray(), []
    for line in (folder / "chats.jsonl").read_text(encoding="utf-8-sig").split("\n"):
        if line.strip():
            row = json.loads(line)
            pair = [("user", row.get("prompt")), *(("assistant", row[name]) for name in COMPLETIONS if name in row)]
            messages = [(m["role"], m["content"]) for m in row["messages"]] if "messages" in row else pair
            for role, text in messages:
                begin, said = f"{role}:\n".encode(), text.strip().encode() + b"\0" * (role == "assistant")
                tokens += begin + said + b"\n\n"
                answers += [*[False] * len(begin), *[role == "assistant"] * len(said), False, False]
    if found[0].tolist() != list(tokens):
        return "another text"
    return None if found[1].tolist() == answers else "other tokens are learned"


def _alone(pieces: Any, processes: int, encoding: Encoding) -> Any:
    """`mmm.data.text.encode.encode` in this process."""
    with mock.patch("threading.Thread"):
        _begin(encoding)
    yield from map(_encode, pieces)


def _prepare(folder: Path, say: Callable[[str], None] = lambda _: None) -> Any:
    with mock.patch.object(preparation, "encode", _alone):
        return preparation.prepare(Preparation((folder / "a.txt", folder / "b.txt"), folder / "made"), 1, say)


def make_progress(folder: Path) -> None:
    """A preparation that was killed after its first file."""
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(TEXT)

    def killed(line: str) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        _prepare(folder, killed)


def make_prepared(folder: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(TEXT)
    _prepare(folder)


def read_prepared(folder: Path) -> Any:
    _prepare(folder, print)
    return _read_tokens("made")(folder)


def seal(folder: Path) -> None:
    """Have the keys be of the files as they lie in this folder, which is another than where they were made."""
    wanted = Preparation((folder / "a.txt", folder / "b.txt"), folder / "made")
    files = preparation._text_files(wanted)
    stamps, key = preparation._identity(wanted, files)
    path, part = folder / "made" / "manifest.json", folder / "made.part"
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):  # changed: it has no key
        if is_small_file(path):
            about = json.loads(path.read_text())
            if isinstance(about.get("key"), str):
                path.write_text(json.dumps(about | {"key": key}))
    encoding = Encoding(part, ByteTokenizer(), b"", "text", (), stamps)
    for left in list(part.glob("piece-*.npz"))[:1]:
        left.rename(encoding.path(next(iter(split(files, preparation.PIECE)))))


def wrong_prepared(folder: Path, found: Any) -> str | None:
    """Of one that had begun."""
    return _differ(found, np.frombuffer(2 * TEXT.encode(), np.uint8), np.array([len(TEXT), 2 * len(TEXT)]))


KINDS = (
    Kind("tokens-folder", make_tokens, ("tokens/*",), _read_tokens("tokens"), wrong_tokens, own=own_ends, sparse=True),
    Kind("tokens-nanogpt", make_nanogpt, ("*.bin",), _read_tokens("train.bin", "uint16"), wrong_nanogpt),
    Kind("tokens-llmc", make_llmc, ("*.bin",), _read_tokens("train.bin"), wrong_llmc, own=own_ends),
    Kind("tokens-megatron", make_megatron, ("train.*",), _read_tokens("train.idx"), wrong_megatron, own=own_ends),
    Kind("tokens-progress", make_progress, ("made.part/*",), read_prepared, wrong_prepared, seal),
    Kind("tokens-prepared", make_prepared, ("made/*",), read_prepared, wrong_tokens, seal),
    Kind("text", make_text, ("text.txt",), read_text, wrong_text),
    Kind("text-json-lines", make_lines, ("text.jsonl",), read_lines, wrong_lines),
    Kind("text-chats", make_chats, ("chats.jsonl",), read_chats, wrong_chats),
)
