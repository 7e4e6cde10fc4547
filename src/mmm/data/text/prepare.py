"""Prepares a folder of tokens (see `mmm.data.text.token_file`) in parallel; a killed preparation can be continued.

Files are read in pieces, whose tokens depend on nothing outside the piece. Worker processes encode them
(`mmm.data.text.encode`). This process writes the tokens in order into ``FOLDER.part``, and after each piece, how far it
is. When it is called again, it continues from there. The folder gets its name when it is complete.
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
from mmm.history.record.folder import reason, write_atomically
from mmm.outside import read_json
from mmm.units import counted

# Bytes of text in a piece, at least, if a file can be split.
PIECE = 1 << 24
# The token at the end of each document that a trained BPE has.
EOS = "<|endoftext|>"
# File in an unfinished folder: what the folder is made from, and how far it is.
STATE = "state.json"


@dataclass(frozen=True)
class Preparation:
    """What to prepare.

    Attributes:
        files: files of text; each is a document.
        folder: folder to make.
        tokenizer: ``bytes``, ``chars``, or a tokenizer's file.
        bpe: vocabulary size of a tokenizer to train on the files instead; None trains none.
        separator: what stands between the documents of a file, and is left out. Empty if a file is one document.
        eos: token to put at the end of each document; None puts none.
        field: the field of a JSON line that holds the text. Empty if the lines themselves are text.
    """

    files: tuple[Path, ...]
    folder: Path
    tokenizer: str = "bytes"
    bpe: int | None = None
    separator: str = ""
    eos: str | None = None
    field: str = "text"


def prepare(wanted: Preparation, processes: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Prepare the folder, or continue a preparation that was killed. Returns its manifest.

    Args:
        processes: number of processes that encode.
        say: called with lines for people.

    Raises:
        ConfigError: the flags do not fit together or do not fit the files.
        DataError: a file is missing, empty or binary, or the folder exists with other contents.
    """
    folder = wanted.folder
    try:
        # All files are checked first: one that is not text is refused before anything is made of the others.
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
        state = _unfinished(unfinished, key)
        manifest = _prepare(wanted, unfinished, files, state, processes, say)
        text = json.dumps(manifest, indent=1)
        write_atomically(unfinished / MANIFEST, text.encode())
        (unfinished / STATE).unlink()
        unfinished.rename(folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {reason(error)}") from None
    return manifest


def _text_file(path: Path, wanted: Preparation) -> TextFile:
    """Check a file. Raises DataError: it is not text."""
    # Without a field, lines of JSON are text like any other.
    is_json_lines = check_text_file(path, str(path), as_it_is=not wanted.field)
    if is_json_lines and wanted.separator:
        raise ConfigError(f"--separator: {path} is JSON lines, and has one document per line: leave it out")
    return TextFile(path, is_json_lines)


def _key(wanted: Preparation) -> str:
    """A hash of everything that determines the tokens: the files' names, sizes and times, the tokenizer, the flags."""
    files = []
    for path in wanted.files:
        status = path.stat()
        files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    # A tokenizer may treat the end of a piece like the end of a text: another piece size gives other tokens.
    rules = [FORMAT, PIECE, files, wanted.tokenizer, wanted.bpe, wanted.separator, wanted.eos, wanted.field]
    digest = hashlib.sha256(json.dumps(rules).encode())
    tokenizer_file = Path(wanted.tokenizer)
    if tokenizer_file.is_file():
        digest.update(tokenizer_file.read_bytes())
    return digest.hexdigest()


def _unfinished(unfinished: Path, key: str) -> dict[str, Any]:
    """Make the unfinished folder, and return how far it is. One of another preparation is removed."""
    state_path = unfinished / STATE
    begin: dict[str, Any] = {"key": key, "pieces": 0, "tokens": 0, "documents": 0, "bytes": 0, "sha256": ""}
    if unfinished.exists():
        # Without that file it is somebody else's folder, and stays.
        name = f"{unfinished} is not an unfinished folder of mmm tokens: its {STATE}"
        state = read_json(state_path, DataError, name=name)
        if state.get("key") == key:
            # Not `isinstance`: True is an int.
            if any(type(state.get(name)) is not type(value) for name, value in begin.items()):
                raise DataError(f"{state_path} is damaged: remove {unfinished}, and it is made again")
            return state
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    write_atomically(state_path, json.dumps(begin).encode())
    return begin


def _prepare(
    wanted: Preparation,
    unfinished: Path,
    files: tuple[TextFile, ...],
    state: dict[str, Any],
    processes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the tokens. Returns the manifest.

    Args:
        state: how far the unfinished folder is. It is updated.
    """
    tokenizer = _tokenizer(wanted, files, unfinished / CharTokenizer.file)
    eos = wanted.eos
    if not eos:
        eos = EOS if wanted.bpe else None
    appended: tuple[int, ...] = ()
    if eos is not None:
        appended = (tokenizer.token(eos),)
    encoding = Encoding(tokenizer, wanted.separator.encode(), wanted.field, appended)
    pieces = list(split(files, PIECE, encoding.separator, tokenizer.splittable))
    n_done = state["pieces"]
    if n_done:
        say(f"continuing: {n_done} of {len(pieces)} pieces are done")
    tokens_path = unfinished / TOKENS
    documents_path = unfinished / DOCUMENTS
    with tokens_path.open("ab") as tokens, documents_path.open("ab") as documents:
        # What a killed process wrote after its last state is written again.
        n_bytes = {tokens: state["tokens"] * tokenizer.dtype.itemsize, documents: state["documents"] * 8}
        for file, size in n_bytes.items():
            if file.tell() < size:
                raise DataError(f"{file.name} has lost its end, which {STATE} counts: remove {unfinished}")
            file.truncate(size)
        for piece in encode(pieces[n_done:], processes, encoding):
            tokens.write(piece.tokens.data)
            # A piece counts from its own first token.
            ends = piece.ends + state["tokens"]
            documents.write(ends.astype("<i8").data)
            for file in (tokens, documents):
                file.flush()
                os.fsync(file.fileno())
            state["pieces"] += 1
            state["tokens"] += len(piece.tokens)
            state["documents"] += len(piece.ends)
            state["bytes"] += piece.bytes
            # The hash so far and the piece, so that it can be continued from the last state.
            digest = hashlib.sha256(state["sha256"].encode())
            digest.update(piece.tokens.tobytes())
            state["sha256"] = digest.hexdigest()
            write_atomically(unfinished / STATE, json.dumps(state).encode())
            megabytes = state["bytes"] / 1e6
            n_documents = counted(state["documents"], "document")
            say(f"{megabytes:.0f} MB of text, {state['tokens']} tokens, {n_documents}")
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
    both = f"{tokenizer.sha256} {state['sha256']}"
    return {
        **state,
        "format": FORMAT,
        "dtype": tokenizer.dtype.str,
        "tokenizer": about,
        "files": [str(path) for path in wanted.files],
        "sha256": hashlib.sha256(both.encode()).hexdigest(),
    }


def _tokenizer(wanted: Preparation, files: tuple[TextFile, ...], path: Path) -> Tokenizer:
    """Load the tokenizer, or make it from the files.

    Args:
        path: where a tokenizer that is made from the files is kept. It is made once.
    """
    if wanted.bpe is None and wanted.tokenizer != CharTokenizer.kind:
        return load_tokenizer(wanted.tokenizer)
    if not path.is_file():
        if wanted.bpe is None:
            texts = _texts(files, wanted.field)
            content = CharTokenizer.of(texts).content
        else:
            # In a process of its own: training starts threads, and processes forked later would hang on their locks.
            with pool_of(1) as pool:
                content = pool.submit(_train, files, wanted.bpe, wanted.field).result()
        write_atomically(path, content)
    return load_tokenizer(path)


def _train(files: tuple[TextFile, ...], vocab_size: int, field: str) -> bytes:
    def lines() -> Iterator[str]:
        for text in _texts(files, field):
            yield from text.decode().splitlines(keepends=True)

    return train_bpe(lines(), vocab_size, EOS)


def _texts(files: tuple[TextFile, ...], field: str) -> Iterator[bytes]:
    """Yield all text, in lines or longer stretches."""
    for piece in split(files, PIECE, b"\n"):
        yield from read_documents(piece, b"", field, utf8=True)
