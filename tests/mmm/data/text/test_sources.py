"""What --text and --tokenizer name: files that go together, and what does not."""

from pathlib import Path

import pytest
import torch

from mmm.data.text.documents import FileTokens
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.sources import open_sources
from mmm.data.text.tokenizer import CharTokenizer
from mmm.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two texts; folders of tokens of the first, by bytes and by its characters."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "a.txt").write_text("Über alle Maßen, " * 90)
    (folder / "b.txt").write_text("all other words, " * 60)
    for name in ("bytes", "chars"):
        prepare(Preparation((folder / "a.txt",), folder / name, name), 1)
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    """A folder of each test's own with these in it."""
    for path in prepared.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tokens_of_a_folder_are_those_of_the_text(folder):
    text, file = (open_sources([Path(name)]) for name in ("a.txt", "bytes"))
    (train, validation), (file_train, file_validation) = (source.tokens(8, 3, 256) for source in (text, file))
    assert isinstance(file_train, FileTokens)
    assert torch.equal(file_validation.batch(1, 4, 0, 4).inputs, validation.batch(1, 4, 0, 4).inputs)

    def epoch(tokens):
        return sorted(tokens.sample(0, place).tobytes() for place in range(tokens.samples))

    assert epoch(file_train) == epoch(train)


def test_tokens_take_their_own_tokenizer(folder):
    own = open_sources([Path("chars")]).tokenizer
    assert own.kind == "chars"
    assert open_sources([Path("chars")], "chars").tokenizer.sha256 == own.sha256


@pytest.mark.parametrize(
    ("text", "tokenizer", "error", "message"),
    [
        (["bytes", "chars"], None, ConfigError, "mmm tokens"),
        (["a.txt", "chars"], None, ConfigError, "chars has tokens"),
        (["a.txt", "c.jsonl"], None, ConfigError, "conversations"),
        (["c.jsonl"], None, DataError, "conversations need a tokenizer with special tokens"),
        (["c.jsonl"], "chars", DataError, "conversations need a tokenizer with special tokens"),
        (["gone"], None, DataError, "--text gone"),
        (["bytes"], "few.json", DataError, r"--tokenizer"),
        (["bytes"], "chars", DataError, r"--tokenizer"),
        (["a.txt"], "few.json", DataError, "a.txt"),
        (["latin"], "chars", DataError, "UTF-8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(folder, text, tokenizer, error, message):
    Path("few.json").write_bytes(CharTokenizer("abc").content)
    Path("c.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    Path("latin").write_bytes("Übermaß".encode("latin1") * 20)
    with pytest.raises(error, match=message) as caught:
        open_sources([Path(path) for path in text], tokenizer)
    assert "\n" not in str(caught.value)
