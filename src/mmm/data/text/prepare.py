"""Prepare a folder of tokens (see `mmm.data.text.token_file`), in parallel; what a killed one has, stays.

Files are read in pieces, whose tokens depend on nothing else. Processes encode them (`mmm.data.text.encode`); this one
writes them in order into ``FOLDER.part``, and there, after each piece, how far it has come. Called again, it goes on
from there. The folder gets its name when all is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.encode import Encoding, encode, pool_of
from mmm.data.text.formats import check_text_file
from mmm.data.text.pieces import TextFile, read_documents, split
from mmm.data.text.token_file import DOCUMENTS, FORMAT, MANIFEST, TOKENS, read_manifest
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer, train_bpe
from mmm.errors import ConfigError, DataError
from mmm.history.record.folder import write_atomically
from mmm.outside import read_json
from mmm.units import counted

PIECE = 1 << 24  # bytes of text, at least, where a file can be split
EOS = "<|endoftext|>"  # of a trained BPE
STATE = "state.json"  # of an unfinished folder: what it is made of, and how far it has come


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
            manifest = read_manifest(folder)
            if manifest.get("key") != key:
                raise DataError(
                    f"{folder} was prepared from other files or with other flags: remove it, or choose another -o"
                )
            say(f"{folder} is complete already")
            return manifest
        unfinished = folder.with_name(folder.name + ".part")
        manifest = _prepare(wanted, unfinished, files, _unfinished(unfinished, key), processes, say)
        write_atomically(unfinished / MANIFEST, json.dumps(manifest, indent=1).encode())
        (unfinished / STATE).unlink()
        unfinished.rename(folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from None
    return manifest


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


def _unfinished(unfinished: Path, key: str) -> dict[str, Any]:
    """Make the unfinished folder, and return how far it has come. One of another preparation goes."""
    if unfinished.exists():
        problem = f"{unfinished}, no unfinished folder of mmm tokens: its {STATE}"
        state = read_json(unfinished / STATE, DataError, name=problem)
        if state.get("key") == key:
            return state
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    state = {"key": key, "pieces": 0, "tokens": 0, "documents": 0, "bytes": 0, "sha256": ""}
    write_atomically(unfinished / STATE, json.dumps(state).encode())
    return state


def _prepare(
    wanted: Preparation,
    unfinished: Path,
    files: tuple[TextFile, ...],
    state: dict[str, Any],
    processes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the tokens. Returns the manifest."""
    tokenizer = _tokenizer(wanted, files, unfinished / CharTokenizer.file)
    for note in tokenizer.notes:
        say(note)
    eos = wanted.eos or (EOS if wanted.bpe else None)
    appended = () if eos is None else (tokenizer.token(eos),)
    encoding = Encoding(tokenizer, wanted.separator.encode(), wanted.field, appended)
    pieces = list(split(files, PIECE, encoding.separator, tokenizer.splittable))
    done = state["pieces"]
    if done:
        say(f"going on: {done} of {len(pieces)} pieces are there")
    with (unfinished / TOKENS).open("ab") as tokens, (unfinished / DOCUMENTS).open("ab") as documents:
        # What was written after the last state goes.
        tokens.truncate(state["tokens"] * tokenizer.dtype.itemsize)
        documents.truncate(state["documents"] * 8)
        for piece in encode(pieces[done:], processes, encoding):
            tokens.write(piece.tokens.data)
            documents.write((piece.ends + state["tokens"]).astype("<i8").data)
            for file in (tokens, documents):
                file.flush()
                os.fsync(file.fileno())
            added = {"pieces": 1, "tokens": len(piece.tokens), "documents": len(piece.ends), "bytes": piece.bytes}
            for name, count in added.items():
                state[name] += count
            # Of the pieces one after the other: it can go on from the last state.
            state["sha256"] = hashlib.sha256(state["sha256"].encode() + piece.tokens.tobytes()).hexdigest()
            write_atomically(unfinished / STATE, json.dumps(state).encode())
            ended = counted(state["documents"], "document")
            say(f"{state['bytes'] / 1e6:.0f} MB of text, {state['tokens']} tokens, {ended}")
    if not state["tokens"]:
        raise DataError(f"{wanted.files[0]}: there is no text in the files")
    if tokenizer.file:
        write_atomically(unfinished / tokenizer.file, tokenizer.content)
    about = {
        "kind": tokenizer.kind,
        "file": tokenizer.file,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eos": eos,
    }
    return {
        **state,
        "format": FORMAT,
        "dtype": tokenizer.dtype.str,
        "tokenizer": about,
        "files": [str(path) for path in wanted.files],
        "sha256": hashlib.sha256(f"{tokenizer.sha256} {state['sha256']}".encode()).hexdigest(),
    }


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
        write_atomically(made, content)
    return load_tokenizer(made)


def _train(files: tuple[TextFile, ...], vocab_size: int, field: str) -> bytes:
    lines = (line for text in _texts(files, field) for line in text.decode().splitlines(keepends=True))
    return train_bpe(lines, vocab_size, EOS)


def _texts(files: tuple[TextFile, ...], field: str) -> Iterator[bytes]:
    """All text, in lines or more at once."""
    for piece in split(files, PIECE, b"\n"):
        yield from read_documents(piece, b"", field, utf8=True)
