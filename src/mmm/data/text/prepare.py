"""Prepare a folder of tokens (see `mmm.data.text.token_file`), in parallel; what a killed one has, stays.

Files are read in pieces, whose tokens depend on nothing else. Processes encode them, each to a file of its own in
``FOLDER.part`` (`mmm.data.text.encode`); when all are there, this one joins them. The folder gets its name when all is
in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.corpus import check_is_file
from mmm.data.text.encode import PIECES, Counts, Encoding, encode, pool_of, read_piece, write
from mmm.data.text.formats import check_text_file
from mmm.data.text.pieces import Piece, TextFile, read_documents, split
from mmm.data.text.token_file import DOCUMENTS, FORMAT, MANIFEST, TOKENS, read_manifest
from mmm.data.text.tokenizer import CharTokenizer, characters, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError
from mmm.outside import Lock, lock

PIECE = 1 << 24  # bytes of text, at least, where a file can be split
EOS = "<|endoftext|>"  # of a trained BPE
LOCK = "lock"
MADE_TOKENIZERS = "tokenizer-*.json"  # by a hash of what they are made of


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
    stamps, key = _identity(wanted, files)
    try:
        if (folder / MANIFEST).is_file():
            manifest = _complete(folder, key)
            say(f"{folder} is complete already")
        else:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise DataError(f"{folder} is there, and is no folder of mmm tokens: choose another -o")
            part.mkdir(parents=True, exist_ok=True)
            for path in part.iterdir():  # somebody else may have made the folder, or what is in it
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise DataError(f"{path} is there, and is no file: remove {part}, or choose another -o")
            with (part / LOCK).open("ab") as file:
                if lock(file.fileno()) is Lock.TAKEN:
                    raise DataError(f"another process is preparing {folder}: wait for it, or choose another -o")
                manifest = _prepare(wanted, part, files, stamps, key, processes, say)
                part.rename(folder)
        for name in (LOCK, PIECES, MADE_TOKENIZERS, f".{PIECES}"):
            for path in folder.glob(name):
                path.unlink()
    except OSError as error:
        raise DataError(f"{error.filename or part}: {error.strerror or error}") from None
    return manifest


def _complete(folder: Path, key: str) -> dict[str, Any]:
    """The manifest of a folder that is there.

    Raises:
        DataError: it is of another preparation, or damaged.
    """
    manifest = read_manifest(folder)
    if manifest.get("key") != key:
        raise DataError(f"{folder} was prepared from other files or with other flags: remove it, or choose another -o")
    for name, size in (
        (TOKENS, manifest["tokens"] * np.dtype(manifest["dtype"]).itemsize),
        (DOCUMENTS, manifest["documents"] * 8),
    ):
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise DataError(
                f"{folder} is damaged: its {name} has {found} bytes, not {size}: remove the folder, and call again"
            )
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


def _identity(wanted: Preparation, text_files: tuple[TextFile, ...]) -> tuple[tuple[str, ...], str]:
    """Of each file its name, size and time; and a hash of all that decides the tokens."""
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
    key = hashlib.sha256(json.dumps([FORMAT, PIECE, files, *flags]).encode() + content).hexdigest()
    return tuple(map(json.dumps, files)), key


def _prepare(
    wanted: Preparation,
    part: Path,
    files: tuple[TextFile, ...],
    stamps: tuple[str, ...],
    key: str,
    processes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    tokenizer = _tokenizer(wanted, files, part / MADE_TOKENIZERS.replace("*", key), processes)
    eos = wanted.eos or (EOS if wanted.bpe else None)
    appended = () if eos is None else (tokenizer.token(eos),)
    encoding = Encoding(part, tokenizer, wanted.separator.encode(), wanted.field, appended, stamps)
    pieces = list(split(files, PIECE, encoding.separator, tokenizer.splittable))
    if there := sum(encoding.path(piece).exists() for piece in pieces):
        say(f"going on: {there} of {len(pieces)} pieces are there")
    total = Counts(0, 0, 0)
    with closing(encode(pieces, processes, encoding)) as encoded:
        for counts in encoded:
            total = Counts(*map(sum, zip(total, counts, strict=True)))
            say(f"{total.bytes / 1e6:.0f} MB of text, {total.tokens} tokens, {total.documents} documents")
    if not total.tokens:
        raise DataError(f"{wanted.files[0]}: there is no text in the files")
    hashes = _join(part, [encoding.path(piece) for piece in pieces], tokenizer.dtype)
    if tokenizer.file:
        write(part / tokenizer.file, tokenizer.content)
    about = {"kind": tokenizer.kind, "file": tokenizer.file, "sha256": tokenizer.sha256}
    manifest = total._asdict() | {
        "format": FORMAT,
        "dtype": tokenizer.dtype.str,
        "tokenizer": about | {"vocab_size": tokenizer.vocab_size, "eos": eos},
        "files": [str(path) for path in wanted.files],
        "sha256": hashlib.sha256("\n".join([tokenizer.sha256, "", *hashes]).encode()).hexdigest(),
        "key": key,
    }
    write(part / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _join(part: Path, pieces: Sequence[Path], dtype: np.dtype) -> list[str]:
    """Write the tokens and the ends of all pieces, in order. Returns the hash of each piece's tokens."""
    hashes, before = [], 0
    with (part / TOKENS).open("wb") as tokens, (part / DOCUMENTS).open("wb") as documents:
        for path in pieces:
            piece = read_piece(path, dtype)
            if piece is None:
                raise DataError(f"{path} is not as it was written: call again, and it is made anew")
            tokens.write(piece.tokens.data)
            documents.write((piece.ends + before).astype("<i8").data)
            before += len(piece.tokens)
            hashes.append(hashlib.sha256(piece.tokens.data).hexdigest())
        for file in (tokens, documents):
            file.flush()
            os.fsync(file.fileno())
    return hashes


def _tokenizer(wanted: Preparation, files: tuple[TextFile, ...], made: Path, processes: int) -> Tokenizer:
    """The tokenizer. One that is made from the files is made once, and kept as `made`."""
    if wanted.bpe is None and wanted.tokenizer != CharTokenizer.kind:
        return load_tokenizer(wanted.tokenizer)
    if not made.is_file():
        if wanted.bpe is not None:
            with pool_of(1) as pool:  # of its own: the library's threads would not survive the fork of others
                content = pool.submit(_train, files, wanted.bpe, wanted.field).result()
        else:
            with pool_of(processes) as pool:
                seen = set().union(*pool.map(partial(_characters, wanted.field), split(files, PIECE)))
            content = CharTokenizer("".join(map(chr, sorted(seen)))).content
        write(made, content)
    return load_tokenizer(made)


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
