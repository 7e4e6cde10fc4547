"""Files that others wrote: whoever reads one of JSON refuses what is none in a line, at once, and waits for nothing."""

import json
import os
import subprocess
import sys

import pytest

import mmm.history
from mmm.checkpoint.manifest import read_manifest
from mmm.checkpoint.safetensors import SafetensorsFile
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.data.text.tokenizer import load_tokenizer
from mmm.errors import RecordError, UserError
from mmm.history import History, write_config
from mmm.history.record.folder import own_files
from mmm.outside import (
    check_heaps,
    is_plain_name,
    open_file,
    parse_json,
    printable,
    printable_lines,
    read_file,
    read_json,
)
from mmm.runtime.startup import MARKS
from mmm.weights.open_weights import open_weights
from mmm_lab.cli.main import main
from mmm_lab.cli.startup import main as startup
from mmm_lab.planner.named_model import read_model
from mmm_launch.errors import UserError as LaunchUserError
from mmm_launch.machines import machine
from support.llamas import write_hugging_face

DEEP = "[" * 100_000
# An integer that Python refuses to read.
DIGITS = '{"n_layers": ' + "9" * 5000 + "}"
# Contents that are no JSON, or no object of it.
BAD = {
    "empty": b"",
    "binary": b"\xff\xfe\x00\xd8{}",
    "cut": b'{"name": ',
    "deep": DEEP.encode(),
    "deep object": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "digits": DIGITS.encode(),
    "list": b"[1, 2]",
    "text": b'"config"',
    "null": b"null",
    "FIFO": None,
}
# Whatever reads a JSON file that others may have written.
READERS = {
    "machine.json": machine.read,
    "model.json": lambda path: read_model(str(path), {}, 16),
    "config.json": lambda path: open_weights(path.parent),
    "model.safetensors.index.json": lambda path: open_weights(path.parent),
    "generation_config.json": lambda path: open_weights(path.parent),
    "tokenizer_config.json": lambda path: open_weights(path.parent),
    "tokenizer.json": load_tokenizer,
    "checkpoint.json": lambda path: read_manifest(path.parent),
    "manifest.json": lambda path: open_tokens(path.parent),
    "journal.jsonl": lambda path: mmm.history.load(path.parent),
    "startup config.json": lambda path: startup([str(path.parent)]),
}


def put(path, content):
    path.unlink(missing_ok=True)
    os.mkfifo(path) if content is None else path.write_bytes(content)
    return path


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_such_file_is_refused_in_a_line(tmp_path, reader, kind):
    name = reader.split()[-1]
    if reader.startswith(("config", "model.s", "generation", "tokenizer_config")):
        write_hugging_face(tmp_path / "of", files=2)
    else:
        (tmp_path / "of").mkdir()
    path = put(tmp_path / "of" / name, BAD[kind])
    with pytest.raises((UserError, LaunchUserError)) as caught:
        READERS[reader](path)
    assert name in str(caught.value) or str(path.parent) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "empty"])
def test_a_record_goes_on_without_a_config_that_is_none(tmp_path, kind):
    """A user may edit config.json: the rows do not depend on it."""
    write_config(tmp_path, {"module": "lm"})
    with History(tmp_path, ranks=[{}]) as history:
        history.update({"loss": 1.0})
    put(tmp_path / "config.json", BAD[kind])
    (tmp_path / "plots").mkdir()
    put(tmp_path / "plots" / "files.json", BAD[kind] if kind != "list" else b"[1, null]")
    assert mmm.history.load(tmp_path)["loss"].values.tolist() == [1.0]
    assert mmm.history.state(tmp_path) == "finished"
    for path in own_files(tmp_path):
        assert path.parent.name in (tmp_path.name, "plots")


def test_the_limits(tmp_path):
    for text, reason in ((DEEP, "nested too deep"), (DIGITS, "5000 digits"), ("{}", "it is not a JSON list")):
        with pytest.raises(ValueError, match=reason):
            parse_json(text, list)
    assert parse_json('\ufeff{"a": 1, "a": 2}'.encode("utf-8")) == {"a": 2}
    (tmp_path / "big").write_bytes(b"12345")
    assert read_file(tmp_path / "big", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_file(tmp_path / "big", 4)
    with pytest.raises(OSError, match="not a regular file"):
        open_file("/dev/zero")
    with pytest.raises(RecordError, match="gone cannot be read: No such file"):
        read_json(tmp_path / "gone", RecordError)


def test_names():
    assert all(map(is_plain_name, ("tokenizer.json", "__0_0.distcp", ".metadata", "ä b")))
    no = ("", ".", "..", "../a", "/etc/passwd", "a/b", "a\0b", "a\nb", "\x1b[31m", "\udc80", "a" * 256, 7, None, ["a"])
    assert not any(map(is_plain_name, no))


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys):
    assert printable("ähnlich 中 😀") == "ähnlich 中 😀"
    assert printable("a\x1b]0;b\x07\n\x9b\u202e\udc80") == "a\\x1b]0;b\\x07\\n\\x9b\\u202e\\udc80"
    assert printable_lines("a\n\tb\x08") == "a\n\tb\\x08"
    (tmp_path / "m.json").write_text(json.dumps({"name": "a", "\x1b[2J": 1}))
    assert main(["plan", "--model", "debug", "--machine", str(tmp_path / "m.json")]) == 2
    assert main(["plan", "--model", "\x1b[2J.json"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_record_s_text_on_a_terminal(tmp_path, capsys):
    marks = {name: [float(i)] for i, name in enumerate(MARKS)}
    begun = {"started_from": "\x1b[2J", "marks": marks, "imports": {"shared": {"\x07": 1.0}, "ranks": [{}]}}
    ranks = [{"host": "\x1b[2J", "rank": 0}]
    write_config(tmp_path, {"module": "\x1b[2J", "ranks": ranks, "startup": begun})
    with History(tmp_path, ranks=[{}]) as history:
        history.update({"loss": 1.0})
    (tmp_path / "train_dataset.h5").rename(tmp_path / "kept")
    journal = {"mmm_journal": 1, "ranks": [{"local_rank": 0}], "attrs": {}}
    (tmp_path / "journal.jsonl").write_text(json.dumps(journal) + "\n")
    config = json.loads((tmp_path / "config.json").read_text()) | {"state": "failed", "error": "\x1b[2J"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["startup", str(tmp_path)]) == 0
    assert main(["history", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "failed: \\x1b[2J" in out
    assert "\x1b[2J" not in out
    assert "\x07" not in out


@pytest.mark.timeout(100)
def test_files_that_are_not_json_are_not_waited_for_either(tmp_path):
    os.mkfifo(tmp_path / "train_dataset.h5")
    with pytest.raises(RecordError, match=r"cannot read .*train_dataset.h5: it is not a regular file"):
        mmm.history.load(tmp_path)
    os.mkfifo(tmp_path / "a.bin")
    os.mkfifo(tmp_path / "b.idx")
    os.mkfifo(tmp_path / "model.safetensors")
    for name in ("a.bin", "b.idx"):
        with pytest.raises(UserError, match="is not a regular file"):
            open_tokens(tmp_path / name) or TokenFile(tmp_path / name, "<u2")
    with pytest.raises(UserError, match="it is not a regular file"):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_a_dataset_that_hdf5_reads_without_an_end(tmp_path):
    """It would not return to Python: another process says whether it does. A heap's first text is overwritten."""
    with History(tmp_path, ranks=[{"host": "n1"}] * 2) as history:
        history.update({"iter": 0, "loss": 1.0}, {"dt": [1.0, 1.0]})
    path = tmp_path / "train_dataset.h5"
    content = bytearray(path.read_bytes())
    check_heaps(content)
    begin = content.find(b"GCOL\x01")
    content[begin + 32 : begin + 96] = bytes(64)
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "mmm_lab.cli.main", "history", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"{begin}" in done.stderr
