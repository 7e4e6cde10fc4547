"""What --text and --tokenizer name: one source or a mixture; the same on every mesh and after a restart."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmm.data import FileTokens, Mixture, TextTokens
from mmm.data.text.prepare import Preparation, prepare
from mmm.data.text.sources import open_sources
from mmm.data.text.tokenizer import CharTokenizer
from mmm.errors import ConfigError, DataError


class Counted(TextTokens):
    """Sample n of source s is s, epoch, n, …"""

    def __init__(self, name, samples):
        super().__init__(np.zeros(samples * 2 + 1, np.uint8), 2, 0)
        self.name = name

    def sample(self, epoch, place):
        return np.array([self.name, epoch, place])


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


def drawn(mixture, first, count):
    return np.stack([mixture.sample(0, place) for place in range(first, first + count)])


def test_each_source_has_its_part(monkeypatch):
    monkeypatch.setattr(Mixture, "BLOCK", 2000)
    mixture = Mixture([Counted(0, 1000), Counted(1, 10), Counted(2, 77)], [6, 3, 1], seed=4)
    rows = drawn(mixture, 0, 2 * Mixture.BLOCK + 500)
    for source, part in enumerate([0.6, 0.3, 0.1]):
        counts = [(rows[:end, 0] == source).mean() for end in (Mixture.BLOCK, 2 * Mixture.BLOCK)]
        assert counts == pytest.approx([part] * 2, abs=1 / Mixture.BLOCK)
        assert abs((rows[:500, 0] == source).mean() - part) < 0.08
        # Each in its own order, without a gap, epoch after epoch, also from one block to the next.
        of_source, samples = rows[rows[:, 0] == source], mixture.sources[source].samples
        assert (of_source[:, 1] * samples + of_source[:, 2] == np.arange(len(of_source))).all()


def test_a_mixture_is_a_function_of_seed_and_step():
    def mixture(seed=0):
        return Mixture([Counted(0, 100), Counted(1, 100)], [1, 1], seed)

    straight = mixture().batch(30, 8, 0, 8).inputs
    assert torch.equal(mixture().batch(30, 8, 0, 8).inputs, straight)
    assert torch.equal(torch.cat([mixture().batch(30, 8, 4 * i, 4).inputs for i in range(2)]), straight)
    assert not torch.equal(mixture(1).batch(30, 8, 0, 8).inputs, straight)
    # An epoch of the mixture leaves nothing out: 200 samples, 66 steps of 3, and the next step follows.
    rows = torch.cat([mixture().batch(step, 3, 0, 3).inputs for step in range(80)])
    assert torch.equal(rows, torch.from_numpy(drawn(mixture(), 0, 240))[:, :-1])


def test_tokens_of_a_folder_are_those_of_the_text(folder):
    text, file = (open_sources([Path(name)]) for name in ("a.txt", "bytes"))
    (train, validation), (file_train, file_validation) = (each.tokens(8, 3, 256) for each in (text, file))
    assert isinstance(file_train, FileTokens)
    assert file.is_bytes
    assert torch.equal(file_validation.batch(1, 4, 0, 4).inputs, validation.batch(1, 4, 0, 4).inputs)

    def epoch(tokens):
        return sorted(tokens.sample(0, place).tobytes() for place in range(tokens.samples))

    assert epoch(file_train) == epoch(train)


def test_a_text_takes_the_tokenizer_of_the_folder_beside_it(folder):
    Path("c.txt").write_text("alle Maßen, " * 30)
    sources = open_sources([Path("chars:0.5"), Path("c.txt:0.5")])
    assert sources.tokenizer.decode(sources.corpora[1].train[:4].tolist()) == "alle"
    assert open_sources([Path("chars")], "chars").vocab_size == sources.vocab_size
    assert open_sources([Path("chars")], "chars/tokenizer.json").vocab_size == sources.vocab_size


@pytest.mark.parametrize(
    ("text", "tokenizer", "error", "words"),
    [
        (["a.txt:1", "b.txt"], None, ConfigError, "a weight greater than 0"),
        (["a.txt:0", "b.txt:1"], None, ConfigError, "a.txt:0"),
        (["a.txt:nan"], None, DataError, "a.txt:nan"),
        (["bytes", "chars"], None, ConfigError, "bytes:0.5 chars:0.5"),
        (["a.txt:much"], None, DataError, "--text a.txt:much"),
        (["gone:1"], None, DataError, "--text"),
        (["bytes"], "few.json", DataError, r"--tokenizer"),
        (["bytes"], "chars", DataError, r"--tokenizer"),
        (["bytes:1", "chars:1"], None, DataError, "chars was made by another tokenizer .* bytes"),
        (["a.txt"], "few.json", DataError, "a.txt"),
        (["latin"], "chars", DataError, "UTF-8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(folder, text, tokenizer, error, words):
    Path("few.json").write_bytes(CharTokenizer("abc").content)
    Path("latin").write_bytes("Übermaß".encode("latin1") * 20)
    with pytest.raises(error, match=words) as caught:
        open_sources([Path(each) for each in text], tokenizer)
    assert "\n" not in str(caught.value)
