"""Prepare a folder of tokens (`mmm.data.token_file` says what is in it), in parallel; what a killed one has, stays.

Files are read in pieces, whose tokens depend on nothing else. Processes encode pieces; this one writes them in order to
``FOLDER.part``, and after each notes how far it is (`mmm.data.progress`). The folder gets its name when all
is in it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.data.progress import NOTHING, Progress
from mmm.data.token_file import DOCUMENTS, FORMAT, MANIFEST, TOKENS
from mmm.data.tokenizer import CharTokenizer, Tokenizer, characters, check_text, load_tokenizer, train_bpe
from mmm.errors import DataError
from mmm.history.alive import Lock, lock

PIECE = 1 << 24  # bytes of text, at least, where a file can be split
EOS = "<|endoftext|>"  # of a trained BPE
JOURNAL = "progress.jsonl"


@dataclass(frozen=True)
class Preparation:
    """What to prepare.

    Attributes:
        files: of text; each is a document. tokenizer: bytes, chars, or a tokenizer's file.
        bpe: train a tokenizer with so many tokens on the files instead.
        separator: what stands between the documents of a file, and is left out; empty: a file is one document.
        eos: token to put at the end of each document.
    """

    files: tuple[Path, ...]
    folder: Path
    tokenizer: str = "bytes"
    bpe: int | None = None
    separator: str = ""
    eos: str | None = None


class Piece(NamedTuple):
    """Bytes begin … end of a file, and its number; `last` where a document ends with it."""

    file: int
    path: Path
    begin: int
    end: int
    last: bool


def prepare(wanted: Preparation, processes: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Prepare the folder, or go on with it. Returns its manifest.

    Args:
        processes: that encode. say: takes lines for people.

    Raises:
        ConfigError, DataError: a file is missing, empty or binary; the folder is there with other contents; another
            process is preparing it.
    """
    if not (folder := wanted.folder).name:
        raise DataError(f"{folder} is there, and is no folder of mmm tokens: choose another -o")
    part = folder.with_name(folder.name + ".part")
    key = _key(wanted)
    if (folder / MANIFEST).is_file():
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("key") != key:
            raise DataError(
                f"{folder} was prepared from other files or with other flags: remove it, or choose another -o"
            )
        for name, size in (
            (TOKENS, manifest["tokens"] * np.dtype(manifest["dtype"]).itemsize),
            (DOCUMENTS, manifest["documents"] * 8),
        ):
            there = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if there != size:
                raise DataError(
                    f"{folder} is damaged: its {name} has {there} bytes, not {size}: remove the folder, and call again"
                )
        say(f"{folder} is complete already")
        return manifest
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there, and is no folder of mmm tokens: choose another -o")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with (part / JOURNAL).open("a+b") as journal:
            if lock(journal.fileno()) is Lock.TAKEN:
                raise DataError(f"another process is preparing {folder}: wait for it, or choose another -o")
            manifest = _prepare(wanted, part, Progress(journal), key, processes, say)
        part.rename(folder)
        (folder / JOURNAL).unlink()
    except OSError as error:
        raise DataError(f"{error.filename or part}: {error.strerror or error}") from None
    return manifest


def _key(wanted: Preparation) -> str:
    """Of all that decides the tokens: files by name, size and time."""
    try:
        stats = [path.stat() for path in wanted.files]
        tokenizer = Path(wanted.tokenizer)
        content = tokenizer.read_bytes() if tokenizer.is_file() else wanted.tokenizer.encode()
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    for path in wanted.files:
        if not path.is_file():
            raise DataError(f"{path} is no file")
    names = [str(path.resolve()) for path in wanted.files]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats, strict=True)]
    about = (FORMAT, PIECE, files, wanted.bpe, wanted.separator, wanted.eos)
    return hashlib.sha256(json.dumps(about).encode() + content).hexdigest()


def _prepare(
    wanted: Preparation, part: Path, journal: Progress, key: str, processes: int, say: Callable[[str], None]
) -> dict[str, Any]:
    _begin_journal(journal, part, key)
    tokenizer = _tokenizer(wanted, part, processes)
    eos = wanted.eos or (EOS if wanted.bpe else None)
    appended = () if eos is None else (tokenizer.token(eos),)
    if lost := journal.check(part / TOKENS, part / DOCUMENTS, tokenizer.dtype.itemsize, tokenizer.sha256):
        say(f"{part} does not have the last {lost} pieces that its {JOURNAL} has: they are written again")
    done = journal.rows[-1]
    if pieces := len(journal.rows) - 1:
        say(f"going on after {pieces} pieces, {done['tokens']} tokens")
    with (part / TOKENS).open("ab") as tokens, (part / DOCUMENTS).open("ab") as documents:
        tokens.truncate(done["tokens"] * tokenizer.dtype.itemsize)
        documents.truncate(done["documents"] * 8)
        todo = islice(_pieces(wanted, tokenizer), pieces, None)
        for encoded in _in_order(todo, processes, (tokenizer, wanted.separator.encode(), appended)):
            ends = (encoded.ends + done["tokens"]).astype("<i8")
            tokens.write(encoded.tokens.data)
            documents.write(ends.data)
            for file in (tokens, documents):
                file.flush()
                os.fsync(file.fileno())
            done = {
                "tokens": done["tokens"] + len(encoded.tokens),
                "documents": done["documents"] + len(ends),
                "bytes": done["bytes"] + encoded.bytes,
                "file": encoded.file,
                "sha256": encoded.sha256,
                "ends_sha256": hashlib.sha256(ends.data).hexdigest(),
                "tokenizer_sha256": tokenizer.sha256,
            }
            journal.append(done)
            say(f"{done['bytes'] / 1e6:.0f} MB of text, {done['tokens']} tokens, {done['documents']} documents")
    if not done["tokens"]:
        raise DataError(f"{wanted.files[0]}: there is no text in the files")
    about = {"kind": tokenizer.kind, "file": tokenizer.file, "sha256": tokenizer.sha256}
    hashes = [tokenizer.sha256, "", *(row["sha256"] for row in journal.rows[1:])]
    manifest = {name: done[name] for name in ("tokens", "documents", "bytes")} | {
        "format": FORMAT,
        "dtype": tokenizer.dtype.str,
        "tokenizer": about | {"vocab_size": tokenizer.vocab_size, "eos": eos},
        "files": [str(path) for path in wanted.files],
        "sha256": hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
        "key": key,
    }
    _write(part / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _begin_journal(journal: Progress, part: Path, key: str) -> None:
    if not journal.rows:
        journal.append({"key": key, **NOTHING})
    if journal.rows[0]["key"] != key:
        raise DataError(f"{part} is a preparation of other files or with other flags: remove it, or choose another -o")


def _write(path: Path, content: bytes) -> None:
    """A file that is there completely or not at all."""
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _tokenizer(wanted: Preparation, part: Path, processes: int) -> Tokenizer:
    """The tokenizer, whose file is kept in `part`: one that is made from the files is made once."""
    made = wanted.bpe is not None or wanted.tokenizer == CharTokenizer.kind
    kept = part / CharTokenizer.file
    if made and kept.is_file():
        return load_tokenizer(kept)
    if wanted.bpe is not None:
        with _pool(1) as pool:  # in a process of its own: the library's threads would not survive the fork of others
            _write(kept, pool.submit(train_bpe, wanted.files, wanted.bpe, EOS).result())
        return load_tokenizer(kept)
    if made:
        with _pool(processes) as pool:
            seen = set().union(*pool.map(_characters, _split(wanted.files, PIECE)))
        tokenizer: Tokenizer = CharTokenizer("".join(map(chr, sorted(seen))))
    else:
        tokenizer = load_tokenizer(wanted.tokenizer)
    if tokenizer.file:
        _write(part / tokenizer.file, tokenizer.content)
    return tokenizer


# --- pieces -----------------------------------------------------------------------------------------------------------


def _pieces(wanted: Preparation, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Split at documents' ends, where there is a separator; else between characters, where the tokenizer lets one."""
    size = PIECE if wanted.separator or tokenizer.splittable else None
    return _split(wanted.files, size, wanted.separator.encode())


def _split(files: Sequence[Path], size: int | None, separator: bytes = b"") -> Iterator[Piece]:
    for number, path in enumerate(files):
        length = path.stat().st_size
        if not length:
            check_text(b"", path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begin = 0
            while begin < length:
                end = length if size is None else min(begin + size, length)
                if separator:
                    found = text.find(separator, end)
                    end = length if found < 0 else found + len(separator)
                while end < length and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
                    end += 1
                yield Piece(number, path, begin, end, bool(separator) or end == length)
                begin = end


class Encoded(NamedTuple):
    """A piece: its file's number, its tokens, (documents,) int64 the tokens before each end of a document, its bytes of
    text, the hash of its tokens."""

    file: int
    tokens: np.ndarray
    ends: np.ndarray
    bytes: int
    sha256: str


def _pool(processes: int, of_all: tuple[Any, ...] = ()) -> ProcessPoolExecutor:
    """Processes that end when this one does, however it ends."""
    return ProcessPoolExecutor(processes, get_context("fork"), _begin, of_all)


_of_all: tuple[Tokenizer, bytes, tuple[int, ...]]  # in a process of the pool: what `_encode` goes by


def _begin(*of_all: Any) -> None:
    global _of_all
    _of_all = of_all  # type: ignore[assignment]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_order(
    pieces: Iterator[Piece], processes: int, of_all: tuple[Tokenizer, bytes, tuple[int, ...]]
) -> Iterator[Encoded]:
    """The pieces encoded; some more than there are processes are under way, so that none of them waits."""
    waiting: deque[Future[Encoded]] = deque()
    with _pool(processes, of_all) as pool:
        for piece in pieces:
            waiting.append(pool.submit(_encode, piece))
            if len(waiting) > processes + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _encode(piece: Piece) -> Encoded:
    tokenizer, separator, appended = _of_all
    text = _read(piece)
    documents = [each for each in text.split(separator) if each] if separator else [text]
    try:
        arrays = [tokenizer.encode(document) for document in documents]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if piece.last and appended:
        end = np.array(appended, tokenizer.dtype)
        arrays = [each for array in arrays for each in (array, end)]
        lengths += len(appended)
    tokens = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
    ends = lengths.cumsum() if piece.last else lengths[:0]
    return Encoded(piece.file, tokens, ends, sum(map(len, documents)), hashlib.sha256(tokens.data).hexdigest())


def _characters(piece: Piece) -> set[int]:
    return characters(_read(piece))


def _read(piece: Piece) -> bytes:
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        return check_text(file.read(piece.end - piece.begin), piece.path)
