"""``mmm tokens`` as a command."""

import pytest

from mmm.data.text.token_file import open_tokens
from mmm.errors import ConfigError
from mmm_lab.cli import main as cli
from mmm_lab.cli import tokens as command


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n" * 30)
    return str(tmp_path / "a.txt")


def test_a_folder_and_what_is_in_it(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main([text, "-o", str(out), "--separator", r"\n\n", "--processes", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 180 tokens (bytes, vocabulary 256), 60 documents, 180 bytes")
    assert len(open_tokens(out).documents()) == 60
    assert command.main([text, "-o", str(out), "--separator", r"\n\n", "--processes", "2"]) == 0
    assert "is complete already" in capsys.readouterr().err


def test_a_bpe_of_its_own(text, tmp_path, capsys):
    assert command.main([text, "-o", str(tmp_path / "out"), "--train-bpe", "260"]) == 0
    assert "(tokenizers, vocabulary 260), 1 document" in capsys.readouterr().out
    assert open_tokens(tmp_path / "out").tokenizer.vocab_size == 260


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-bpe", "300", "--tokenizer", "chars"], "--train-bpe and --tokenizer contradict"),
        (["--train-bpe", "300", "--eos", "x"], "--train-bpe and --eos contradict"),
        (["--processes", "0"], "--processes: 0: "),
        (["--train-bpe", "100"], "--train-bpe 100"),
    ],
)
def test_flags_that_do_not_fit(text, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        command.main([text, "-o", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_json_lines(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert command.main([str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "out"), "--field", "body"]) == 0
    assert "6 tokens" in capsys.readouterr().out


def test_an_error_is_one_line(tmp_path, capsys):
    assert cli.main(["tokens", str(tmp_path / "gone"), "-o", str(tmp_path / "out")]) == 2
    assert str(tmp_path / "gone") in capsys.readouterr().err
