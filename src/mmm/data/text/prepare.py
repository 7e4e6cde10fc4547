"""Prepare a folder of tokens (see `mmm.data.text.token_file`), in parallel; what a killed one has, stays.

Files are read in pieces, whose tokens depend on nothing else. Processes encode them, each to a file of its own in
``FOLDER.part`` (`mmm.data.text.encode`); when all are there, this one joins them. The folder gets its name when all is
in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.encode import Counts, Encoding, encode, pool_of, read_piece, write
from mmm.data.text.formats import check_text_file
from mmm.data.text.pieces import TextFile, read_documents, split
from mmm.data.text.token_file import DOCUMENTS, FORMAT, MANIFEST, TOKENS, read_manifest
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError

PIECE = 1 << 24  # bytes of text, at least, where a file can be split
EOS = "<|endoftext|>"  # of a trained BPE
KEY = "key"  # the file that says what an unfinished folder is made of


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
        ConfigError, DataError: a file is missing, empty or binary; the folder is there with other contents.
    """
    folder = wanted.folder
    try:
        files = tuple(_text_file(path, wanted) for path in wanted.files)
        key = _key(wanted)
        if folder.exists():
            if read_manifest(folder).get("key") != key:
                raise DataError(
                    f"{folder} was prepared from other files or with other flags: remove it, or choose another -o"
                )
            say(f"{folder} is complete already")
            return read_manifest(folder)
        part = folder.with_name(folder.name + ".part")
        _begin_part(part, key)
        manifest = _prepare(wanted, part, files, processes, say)
        (part / KEY).unlink()
        write(part / MANIFEST, json.dumps({**manifest, "key": key}, indent=1).encode())
        part.rename(folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from None
    return read_manifest(folder)


def _text_file(path: Path, wanted: Preparation) -> TextFile:
    """A file that was looked at: one that is no text is refused before anything is made of the others."""
    file = TextFile(path, check_text_file(path, str(path), as_it_is=not wanted.field))
    if file.jsonl and wanted.separator:
        raise ConfigError(f"--separator: {path} is JSON lines, and has a document a line: leave it out")
    return file


def _key(wanted: Preparation) -> str:
    """A hash of all that decides the tokens: the files' names, sizes and times, the tokenizer and the flags."""
    files = []
    for path in wanted.files:
        stat = path.stat()
        files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    rules = [FORMAT, PIECE, files, wanted.tokenizer, wanted.bpe, wanted.separator, wanted.eos, wanted.field]
    digest = hashlib.sha256(json.dumps(rules).encode())
    if Path(wanted.tokenizer).is_file():
        digest.update(Path(wanted.tokenizer).read_bytes())
    return digest.hexdigest()


def _begin_part(part: Path, key: str) -> None:
    """Make the unfinished folder; one of the same preparation stays as it is, one of another goes."""
    if part.exists():
        if not (part / KEY).is_file():
            raise DataError(f"{part} is there, and is no unfinished folder of mmm tokens: choose another -o")
        if (part / KEY).read_text() == key:
            return
        shutil.rmtree(part)
    part.mkdir(parents=True)
    write(part / KEY, key.encode())


def _prepare(
    wanted: Preparation, part: Path, files: tuple[TextFile, ...], processes: int, say: Callable[[str], None]
) -> dict[str, Any]:
    tokenizer = _tokenizer(wanted, files, part / CharTokenizer.file)
    for note in tokenizer.notes:
        say(note)
    eos = wanted.eos or (EOS if wanted.bpe else None)
    appended = () if eos is None else (tokenizer.token(eos),)
    encoding = Encoding(part, tokenizer, wanted.separator.encode(), wanted.field, appended)
    pieces = list(split(files, PIECE, encoding.separator, tokenizer.splittable))
    done = sum(encoding.path(piece).exists() for piece in pieces)
    if done:
        say(f"going on: {done} of {len(pieces)} pieces are there")
    total = Counts(0, 0, 0)
    for counts in encode(pieces, processes, encoding):
        total = Counts(*map(sum, zip(total, counts, strict=True)))
        say(f"{total.bytes / 1e6:.0f} MB of text, {total.tokens} tokens, {total.documents} documents")
    if not total.tokens:
        raise DataError(f"{wanted.files[0]}: there is no text in the files")
    hashes = _join(part, [encoding.path(piece) for piece in pieces])
    if tokenizer.file:
        write(part / tokenizer.file, tokenizer.content)
    return {
        **total._asdict(),
        "format": FORMAT,
        "dtype": tokenizer.dtype.str,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": tokenizer.file,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos": eos,
        },
        "files": [str(path) for path in wanted.files],
        "sha256": hashlib.sha256("\n".join([tokenizer.sha256, "", *hashes]).encode()).hexdigest(),
    }


def _join(part: Path, pieces: Sequence[Path]) -> list[str]:
    """Write the tokens and the ends of all pieces, in order, and remove these. Returns the hash of each
    piece's tokens."""
    hashes = []
    before = 0
    with (part / TOKENS).open("wb") as tokens, (part / DOCUMENTS).open("wb") as documents:
        for path in pieces:
            piece = read_piece(path)
            if piece is None:
                raise DataError(f"{path} is not as it was written: call again, and it is made anew")
            tokens.write(piece.tokens.data)
            documents.write((piece.ends + before).astype("<i8").data)
            before += len(piece.tokens)
            hashes.append(hashlib.sha256(piece.tokens.data).hexdigest())
        for file in (tokens, documents):
            file.flush()
            os.fsync(file.fileno())
    for path in pieces:
        path.unlink()
    return hashes


def _tokenizer(wanted: Preparation, files: tuple[TextFile, ...], made: Path) -> Tokenizer:
    """The tokenizer. One that is made from the files is made once, and kept as `made`."""
    if wanted.bpe is None and wanted.tokenizer != CharTokenizer.kind:
        return load_tokenizer(wanted.tokenizer)
    if not made.is_file():
        if wanted.bpe is None:
            content = CharTokenizer.of(_texts(files, wanted.field)).content
        else:
            with pool_of(1) as pool:  # of its own: the library's threads would not survive the fork of others
                content = pool.submit(_train, files, wanted.bpe, wanted.field).result()
        write(made, content)
    return load_tokenizer(made)


def _train(files: tuple[TextFile, ...], vocab_size: int, field: str) -> bytes:
    lines = (line for text in _texts(files, field) for line in text.decode().splitlines(keepends=True))
    return train_bpe(lines, vocab_size, EOS)


def _texts(files: tuple[TextFile, ...], field: str) -> Iterator[bytes]:
    """All text, in lines or more at once."""
    for piece in split(files, PIECE, b"\n"):
        yield from read_documents(piece, b"", field, utf8=True)
