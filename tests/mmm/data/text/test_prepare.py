"""Preparing tokens: the same in any number of processes, after any kill; documents and their ends; what is refused.
Pieces of texts: together they have the documents of the text, whatever its separators, its bytes and their size."""

import json
import multiprocessing
import os
import random
import re
import signal
from itertools import pairwise

import numpy as np
import pytest

import mmm.data.text.prepare as module
from mmm.data.text.pieces import TextFile, read_documents, split
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.token_file import open_tokens
from mmm.errors import DataError

FORK = multiprocessing.get_context("fork")
WORDS = [f"Word {i} é 😀 of the text\n" for i in range(400)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three files, and pieces of at least 1000 bytes: about a dozen."""
    monkeypatch.setattr(module, "PIECE", 1000)
    paths = tuple(tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    for path, words_of_file in zip(paths, (WORDS[:200], WORDS[200:201], WORDS[201:]), strict=True):
        path.write_text("".join(words_of_file))
    return paths


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_tokens_and_documents(files, tmp_path, tokenizer):
    flags = {"bpe": 300} if tokenizer == "bpe" else {"tokenizer": tokenizer}
    about = prepare(Preparation(files, tmp_path / "out", **flags), 2)
    corpus = open_tokens(tmp_path / "out")
    tokens = np.concatenate([corpus.train[:], corpus.validation[:]])
    begins = [0, *corpus.documents()[:]]
    documents = [corpus.tokenizer.decode(tokens[begin:end].tolist()) for begin, end in pairwise(begins)]
    end = "<|endoftext|>" if tokenizer == "bpe" else ""
    assert documents == [path.read_text() + end for path in files]
    assert about["bytes"] == sum(path.stat().st_size for path in files)
    assert about["tokens"] == begins[-1] == len(tokens)
    assert corpus.sha256 == about["sha256"]


@pytest.mark.parametrize("flags", [{}, {"tokenizer": "chars"}, {"separator": "\n"}], ids=str)
def test_any_number_of_processes(files, tmp_path, flags):
    results = []
    for processes in (1, 3):
        prepare(Preparation(files, tmp_path / str(processes), **flags), processes)
        about = json.loads((tmp_path / str(processes) / "manifest.json").read_text())
        results.append((content(tmp_path / str(processes)), about))
    assert results[0] == results[1]


def test_documents_with_a_separator(files, tmp_path):
    files[0].write_text("<s>one<s><s>" + "two" * 700 + "<s>three")
    about = prepare(Preparation(files[:1], tmp_path / "out", separator="<s>", eos=None), 1)
    corpus = open_tokens(tmp_path / "out")
    assert corpus.documents()[:].tolist() == [3, 2103, 2108]
    assert about["documents"] == 3
    assert bytes(np.concatenate([corpus.train[:], corpus.validation[:]])) == b"one" + b"two" * 700 + b"three"


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(folder):
    corpus = open_tokens(folder)
    tokens = np.concatenate([corpus.train[:], corpus.validation[:]])
    return [corpus.tokenizer.decode(tokens[begin:end]) for begin, end in pairwise([0, *corpus.documents()[:]])]


ROWS = [{"text": "The cat sat.\nIt was été.", "meta": {"id": 1}}, {"text": ""}, {"text": "Dogs bark.", "body": "no"}]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_json_lines(files, tmp_path, tokenizer):
    """Each line's text is a document, in pieces as well; beside a file of text, which is one."""
    flags = {"bpe": 300} if tokenizer == "bpe" else {"tokenizer": tokenizer}
    path = lines(tmp_path / "a.jsonl", ROWS * 40)
    about = prepare(Preparation((path, files[1]), tmp_path / "out", **flags), 2)
    end = "<|endoftext|>" if tokenizer == "bpe" else ""
    expected = [ROWS[0]["text"], ROWS[2]["text"]] * 40 + [files[1].read_text()]
    assert texts_of(tmp_path / "out") == [text + end for text in expected]
    assert about["documents"] == 81
    assert about["bytes"] == sum(len(text.encode()) for text in expected)
    if tokenizer != "bytes":
        known = open_tokens(tmp_path / "out").tokenizer.content.decode()
        assert "{" not in json.loads(known).get("chars", "")
    if tokenizer == "bpe":
        vocabulary = json.loads(known)["model"]["vocab"]
        assert "sat" in vocabulary or "Ġsat" in vocabulary
        assert not any("meta" in word for word in vocabulary)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"body": "x", "id": 3}',
            "it has no text as 'text': name the field with the text by --field",
        ),
        ('{"text": null}', "it has no text as 'text'"),
        ('"text"', "it is not a JSON object"),
        ('{"text": "x"', "it is not JSON"),
        ('{"text": "\\ud83d"}', "'utf-8' codec"),
    ],
)
def test_a_line_without_text(files, tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good enough"}\n' * 70 + line + "\n")  # in the second piece
    with pytest.raises(DataError) as caught:
        prepare(Preparation((files[0], path), tmp_path / "out"), 2)
    assert str(caught.value).startswith(f"{path}, line 71: {message}")


def _prepare_and_die(wanted, lines, most_lines):
    def say(line):
        lines.append(line)
        if len(lines) == most_lines:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(wanted, 2, say)


def killed_after(wanted, lines):
    """The unfinished folder of a preparation that was killed when it had said so many lines."""
    killed = FORK.Process(target=_prepare_and_die, args=(wanted, [], lines))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not wanted.folder.exists()
    return wanted.folder.with_name(f"{wanted.folder.name}.part")


@pytest.mark.parametrize(
    "flags", [{}, pytest.param({"tokenizer": "chars"}, marks=pytest.mark.long), {"bpe": 300}], ids=str
)
def test_a_killed_preparation_goes_on(files, tmp_path, flags, monkeypatch):
    wanted = Preparation(files, tmp_path / "killed", **flags)
    unfinished = killed_after(wanted, 2)
    with pytest.raises(DataError):
        open_tokens(unfinished)
    with (unfinished / "tokens.bin").open("ab") as tokens:
        tokens.write(b"half of a piece")
    messages = []
    train = module.train_bpe
    monkeypatch.setattr(module, "train_bpe", None)  # it has been trained
    about = prepare(wanted, 2, messages.append)
    assert re.match(r"continuing: [1-9]\d* of \d+ pieces are done", messages[0])
    monkeypatch.setattr(module, "train_bpe", train)
    assert not unfinished.exists()
    other = prepare(Preparation(files, tmp_path / "straight", **flags), 2)
    assert about == other
    assert content(wanted.folder) == content(tmp_path / "straight")
    assert content(wanted.folder).keys() <= {"tokens.bin", "documents.bin", "tokenizer.json"}


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_part_that_has_lost_its_end_is_not_gone_on_with(files, tmp_path, name):
    """The file was filled up with zeros: most tokens were token 0 then, and the exit code 0."""
    unfinished = killed_after(Preparation(files, tmp_path / "out", separator="\n"), 6)
    path = unfinished / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"{name} has lost its end.*remove {unfinished}"):
        prepare(Preparation(files, tmp_path / "out", separator="\n"), 1)


@pytest.mark.parametrize("changed", [{"sha256": None}, {"tokens": None}, {"documents": "3"}, {"pieces": True}])
def test_a_state_that_is_damaged(files, tmp_path, changed):
    unfinished = killed_after(Preparation(files, tmp_path / "out"), 2)
    file = unfinished / "state.json"
    state = json.loads(file.read_text()) | changed
    # None stands for a key that the file lacks.
    state = {key: value for key, value in state.items() if value is not None}
    file.write_text(json.dumps(state))
    with pytest.raises(DataError, match=rf"state.json is damaged: remove {unfinished}"):
        prepare(Preparation(files, tmp_path / "out"), 1)


def test_a_part_of_another_is_not_gone_on_with(files, tmp_path):
    killed_after(Preparation(files, tmp_path / "out", separator="\n"), 2)
    messages = []
    about = prepare(Preparation(files, tmp_path / "out", "chars"), 1, messages.append)
    assert not messages[0].startswith("continuing")
    assert about == prepare(Preparation(files, tmp_path / "straight", "chars"), 1)
    assert content(tmp_path / "out") == content(tmp_path / "straight")


def test_a_folder_of_somebody_elses_stays(files, tmp_path):
    for name in ("out", "other.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("kept")
        with pytest.raises(DataError, match=name):
            prepare(Preparation(files, tmp_path / name.removesuffix(".part")), 1)
        assert (tmp_path / name / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("write", "flags", "message"),
    [
        (lambda path: path.unlink(), {}, "No such file"),
        (lambda path: path.write_bytes(b""), {}, "c.txt"),
        (lambda path: path.write_bytes(b"a\0"), {}, "byte 1 is NUL"),
        (lambda path: path.write_bytes(b"a" * 10 + b"\xff"), {"tokenizer": "chars"}, "not UTF-8"),
        (lambda path: (path.unlink(), path.mkdir()), {}, "c.txt: it is not a regular file"),
        (lambda path: None, {"tokenizer": "gone.json"}, "gone.json"),
    ],
)
def test_what_is_refused(files, tmp_path, write, flags, message):
    write(files[2])
    with pytest.raises(DataError) as caught:
        prepare(Preparation(files, tmp_path / "out", **flags), 2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


PIECE = 1 << 24


def pieces_of(path, size, separator, splittable=True):
    return list(split([TextFile(path, False)], size, separator, splittable))


def documents_of(path, size, separator):
    pieces = pieces_of(path, size, separator)
    assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == path.stat().st_size
    assert all(piece.end - piece.begin >= size for piece in pieces[:-1])
    return [document for piece in pieces for document in read_documents(piece, separator, "text", utf8=False)]


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba", b"aab", b"aaaa", "é".encode(), b"<s>"], ids=str)
def test_documents_are_those_of_the_text(tmp_path, separator):
    generator, path = random.Random(0), tmp_path / "text"
    letters = [bytes([byte]) for byte in {*separator, *b"ab", 0x80, 0xBF, 0xC3}] + [separator] * 2
    for _ in range(60):
        text = b"".join(generator.choice(letters) for _ in range(generator.randrange(1, 40)))
        path.write_bytes(text)
        expected = [document for document in text.split(separator) if document]
        for size in (1, 2, 3, 7, 20):
            assert documents_of(path, size, separator) == expected


def test_a_separator_at_the_edge_of_a_piece(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * (PIECE - 1) + b"\n\n" + b"\n" + b"b" * 100 + b"\n\n" + b"c" * 50)
    assert list(map(len, documents_of(path, PIECE, b"\n\n"))) == [PIECE - 1, 101, 50]
