"""Prepare a folder of tokens (see `mmm.data.text.token_file`), in parallel; what a killed one has, stays.

Files are read in pieces, whose tokens depend on nothing else. Processes encode pieces; this one writes them in order to
``FOLDER.part``, and after each notes how far it is (`mmm.data.text.progress`). The folder gets its name when all
is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.encode import Encoding, encode, pool_of
from mmm.data.text.formats import check_is_file, check_text_file
from mmm.data.text.pieces import Piece, TextFile, read_documents, split
from mmm.data.text.progress import NOTHING, Progress, Row
from mmm.data.text.token_file import DOCUMENTS, FORMAT, MANIFEST, TOKENS, read_manifest
from mmm.data.text.tokenizer import CharTokenizer, characters, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError
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
        field: what has the text of JSON lines; empty: the lines themselves are text.
    """

    files: tuple[Path, ...]
    folder: Path
    tokenizer: str = "bytes"
    bpe: int | None = None
    separator: str = ""
    eos: str | None = None
    field: str = "text"

    @property
    def tokenizer_is_made(self) -> bool:
        """Of the files: all its tokens are of them all."""
        return self.bpe is not None or self.tokenizer == CharTokenizer.kind


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
    files = _text_files(wanted)
    header = _header(wanted, files)
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest.get("key") != header["key"]:
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
        for path in part.iterdir():  # somebody else may have made the folder, or what is in it
            if not stat.S_ISREG(path.lstat().st_mode):
                raise DataError(f"{path} is there, and is no file: remove {part}, or choose another -o")
        with (part / JOURNAL).open("a+b") as journal:
            if lock(journal.fileno()) is Lock.TAKEN:
                raise DataError(f"another process is preparing {folder}: wait for it, or choose another -o")
            manifest = _prepare(wanted, part, Progress(journal), files, header, processes, say)
        part.rename(folder)
        (folder / JOURNAL).unlink()
    except OSError as error:
        raise DataError(f"{error.filename or part}: {error.strerror or error}") from None
    return manifest


def _text_files(wanted: Preparation) -> tuple[TextFile, ...]:
    """The files, each looked at: one that is no text is refused before anything is made of the others."""
    found = []
    for path in wanted.files:
        try:
            check_is_file(path)
            found.append(TextFile(path, check_text_file(path, str(path), as_it_is=not wanted.field)))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        if found[-1].jsonl and wanted.separator:
            raise ConfigError(f"--separator: {path} is JSON lines, and has a document a line: leave it out")
    return tuple(found)


def _header(wanted: Preparation, text_files: tuple[TextFile, ...]) -> Row:
    """Of all that decides the tokens: a key, and what it is of: the files by name, size and time, and the rest."""
    try:
        stats = [path.stat() for path in wanted.files]
        tokenizer = Path(wanted.tokenizer)
        content = tokenizer.read_bytes() if tokenizer.is_file() else wanted.tokenizer.encode()
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    names = [str(path.resolve()) for path in wanted.files]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(names, stats, strict=True)]
    flags = [wanted.bpe, wanted.separator, wanted.eos]
    if any(file.jsonl for file in text_files):
        flags.append(wanted.field)
    key, of_names = (
        hashlib.sha256(json.dumps([FORMAT, PIECE, each, *flags]).encode() + content).hexdigest()
        for each in (files, names)
    )
    return {"key": key, "names_key": of_names, "files": files, **NOTHING}


def _prepare(
    wanted: Preparation,
    part: Path,
    journal: Progress,
    files: tuple[TextFile, ...],
    header: Row,
    processes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    _begin_journal(journal, part, header, wanted.tokenizer_is_made, say)
    tokenizer = _tokenizer(wanted, files, part, processes)
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
        encoding = Encoding(tokenizer, wanted.separator.encode(), wanted.field, appended)
        todo = islice(split(files, PIECE, encoding.separator, tokenizer.splittable), pieces, None)
        for encoded in encode(todo, processes, encoding):
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
        "key": header["key"],
    }
    _write(part / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _begin_journal(
    journal: Progress, part: Path, header: Row, tokenizer_is_made: bool, say: Callable[[str], None]
) -> None:
    """Leave the rows that are of this preparation. Where a file has changed since, such as one that was refused, those
    of the files before it."""
    if not journal.rows:
        journal.append(header)
    before, rows = journal.rows[0], journal.rows[1:]
    if before["key"] == header["key"]:
        return
    made = part / CharTokenizer.file
    if before.get("names_key") != header["names_key"] and (rows or made.is_file()):
        raise DataError(f"{part} is a preparation of other files or with other flags: remove it, or choose another -o")
    kept: list[Row] = []
    if before.get("names_key") == header["names_key"]:
        pairs = enumerate(zip(header["files"], before.get("files", []), strict=False))
        changed = next((number for number, (new, old) in pairs if new != old), 0)
        kept = [] if tokenizer_is_made else [row for row in rows if row["file"] < changed]
        say(f"{header['files'][changed][0]} has changed: {len(rows) - len(kept)} pieces are written again")
    made.unlink(missing_ok=True)
    journal.truncate(0)
    for row in (header, *kept):
        journal.append(row)


def _write(path: Path, content: bytes) -> None:
    """A file that is there completely or not at all."""
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _tokenizer(wanted: Preparation, files: tuple[TextFile, ...], part: Path, processes: int) -> Tokenizer:
    """The tokenizer, whose file is kept in `part`: one that is made from the files is made once."""
    made, kept = wanted.tokenizer_is_made, part / CharTokenizer.file
    if made and kept.is_file():
        return load_tokenizer(kept)
    if wanted.bpe is not None:
        with pool_of(1) as pool:  # in a process of its own: the library's threads would not survive the fork of others
            _write(kept, pool.submit(_train, files, wanted.bpe, wanted.field).result())
        return load_tokenizer(kept)
    if made:
        with pool_of(processes) as pool:
            seen = set().union(*pool.map(partial(_characters, wanted.field), split(files, PIECE)))
        tokenizer: Tokenizer = CharTokenizer("".join(map(chr, sorted(seen))))
    else:
        tokenizer = load_tokenizer(wanted.tokenizer)
    if tokenizer.file:
        _write(part / tokenizer.file, tokenizer.content)
    return tokenizer


def _characters(field: str, piece: Piece) -> set[int]:
    return set[int]().union(*map(characters, read_documents(piece, b"", field, utf8=True)))


def _train(files: tuple[TextFile, ...], vocab_size: int, field: str) -> bytes:
    """A BPE of the files. Each is read first: the package names no file that it cannot read."""
    jsonl = False
    for piece in split(files, PIECE):
        read_documents(piece, b"", field, utf8=True)
        jsonl |= piece.text_file.jsonl

    def texts() -> Iterator[str]:  # of text the lines, as the package reads files
        for piece in split(files, PIECE):
            lines = read_documents(piece, b"", field, utf8=True)
            if not piece.text_file.jsonl:
                lines = lines[0].splitlines(keepends=True)
            yield from map(bytes.decode, lines)

    return train_bpe([file.path for file in files], vocab_size, EOS, texts if jsonl else None)
