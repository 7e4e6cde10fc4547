"""``mmm import``, ``mmm export`` and ``mmm sample`` as commands."""

import io
import json
import re
import sys

import pytest
import torch

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.generate import tokenizer_on_disk
from mmm.models.llama.model import Transformer
from mmm.nn.sampling import Sampling
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import main as cli
from mmm_lab.cli.written_text import TextWriter
from support.clock import PATIENCE
from support.launcher import Launcher
from support.llamas import CHARS, CONFIG, begin_with, byte_bpe, logits, tensors, write_hugging_face

TOKENS, PROMPT = 20, "First Citizen:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def imported(folder):
    assert cli.main(["import", str(folder), "-o", str(folder.parent / "own")]) == 0
    return folder.parent / "own"


@pytest.fixture(scope="module")
def expected():
    """What the weights write, token by token, by what `transformers` computes."""
    text = [CHARS.index(letter) for letter in PROMPT]
    for n in range(TOKENS):
        last = logits(CONFIG, tensors(), torch.tensor([text]))[0, -1, : len(CHARS)]
        text.append(Sampling(temperature=0.5, top_k=20, seed=3).draw(last, n))
    return "".join(CHARS[token] for token in text)


# Drawn the same way by the command and by hand.
FLAGS = ["--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--temperature", "0.5", "--top-k", "20", "--seed", "3"]


def test_export_and_import_again(folder, imported, tmp_path, capsys):
    assert cli.main(["import", str(folder), "-o", str(tmp_path / "own")]) == 0
    assert f"{sum(tensor.numel() for tensor in tensors().values()):,}" in capsys.readouterr().out
    assert cli.main(["export", str(imported), "-o", str(tmp_path / "hf"), "--dtype", "fp64", "--shard-gb", "2e-5"]) == 0
    out = capsys.readouterr()
    assert "files of tensors" in out.out
    assert "bytes or characters, which transformers has no file for" in out.err
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors().keys()
    weights = open_weights(tmp_path / "hf")
    model = Transformer(config_of(weights)).double()
    model.load_state_dict({n: weights.read_full(n) for n in weights.entries})
    tokens = torch.arange(30)[None]
    torch.testing.assert_close(model(tokens), logits(CONFIG, tensors(), tokens), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["own", "hf"])
def test_sample_writes_what_the_weights_say(folder, imported, expected, capsys, kind):
    assert cli.main(["sample", str(imported if kind == "own" else folder), *FLAGS, "--dtype", "fp64"]) == 0
    out = capsys.readouterr()
    assert out.out == expected + "\n"
    assert f"{TOKENS} tokens in " in out.err


def test_the_likeliest_tokens_are_shown(imported, expected, capsys):
    assert cli.main(["sample", str(imported), *FLAGS, "--dtype", "fp64", "--show"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n\n{expected}\n")
    bars = re.findall(r"^  [ >] (?: +(\d+\.\d) %)? (#*) +('.+'|token \d+)$", out, re.MULTILINE)
    # Five tokens each, and the one that was drawn where it is another.
    assert TOKENS * 5 <= len(bars) <= TOKENS * 6
    for percent, bar, _ in bars:
        assert round(float(percent or 0) * 0.3) - len(bar) in (-1, 0, 1)
    assert out.count("\n  > ") == TOKENS
    assert out.isprintable() or set(filter(lambda char: not char.isprintable(), out)) == {"\n"}


@pytest.mark.long
@pytest.mark.parametrize("axes", [["--tp", "2"], ["--tp", "2", "--pp", "2"]], ids=" ".join)
def test_sample_on_ranks(imported, expected, tmp_path, axes):
    launcher = Launcher(tmp_path)
    ranks = "4" if "--pp" in axes else "2"
    argv = ["-n", ranks, "--device", "cpu", "python3", "-m", "mmm_lab.cli.main", "sample", str(imported), *FLAGS]
    done = launcher.run(*argv, "--dtype", "fp64", *axes, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


# All bytes, and two tokens of their own.
LARGER = {**CONFIG, "vocab_size": 258, "eos_token_id": 0}


def greedy(tokens):
    """What the weights write, the most probable token each time, by what `transformers` computes."""
    for _ in range(TOKENS):
        # (vocabulary,): of the token to come
        last = logits(LARGER, tensors(LARGER), torch.tensor([tokens]))[0, -1]
        tokens = [*tokens, int(last.argmax())]
    return tokens


@pytest.mark.parametrize("prompt", [PROMPT, f"<|begin|>{PROMPT}", ""], ids=["", "begun", "empty"])
def test_a_text_begins_as_its_tokenizer_has_it(tmp_path, capsys, prompt):
    """Also where the prompt says it by itself; and then there is a first token, even before an empty prompt."""
    write_hugging_face(tmp_path / "hf", LARGER)
    content = byte_bpe(("<|begin|>", "<|end|>"), begin_with("<|begin|>"))
    (tmp_path / "hf" / "tokenizer.json").write_bytes(content)
    tokenizer = tokenizer_on_disk(open_weights(tmp_path / "hf").metadata)
    bytes_of = tokenizer.encode(prompt.removeprefix("<|begin|>").encode()).tolist()
    expected = greedy([256, *bytes_of])
    assert expected[1 + len(bytes_of) :] != greedy(bytes_of or [0])[len(bytes_of or [0]) :]
    flags = ["--prompt", prompt, "--max-new-tokens", str(TOKENS), "--temperature", "0", "--dtype", "fp64"]
    assert cli.main(["sample", str(tmp_path / "hf"), *flags]) == 0
    assert capsys.readouterr().out == tokenizer.decode(expected[1:]) + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sample", "OWN", "--prompt", "Zoë"], "--prompt"),
        (["sample", "OWN", "--prompt", ""], "--prompt is empty"),
        (["sample", "OWN", "--prompt", "x" * 65], "--prompt has 65"),
        (["sample", "OWN", "--prompt", "x", "--top-p", "2"], "--top-p 2.0"),
        (["sample", "OWN", "--prompt", "x", "--tp", "2"], "tp 2"),
        (["sample", "OWN", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens: 0: "),
        (["sample", "OWN", "--prompt", "x", "--timeout", "-1"], "--timeout -1.0"),
        (["sample", "OWN", "--prompt", "x", "--timeout", "nan"], "--timeout"),
        (["sample", "OWN", "--prompt", "x", "--seed", str(2**63)], "it must fit in 64 bits"),
        (["sample", "BARE", "--prompt", "x"], "--prompt"),
        (["sample", "GONE", "--prompt", "x"], "No such file or directory"),
        (["import", "HF", "-o", "OWN"], "is there already: give another folder"),
        (["export", "OWN", "-o", "OUT", "--shard-gb", "0"], "--shard-gb 0.0"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(folder, imported, tmp_path, capsys, argv, message):
    paths = {"OWN": imported, "HF": folder, "OUT": tmp_path / "out", "GONE": tmp_path / "gone"}
    if "BARE" in argv:
        paths["BARE"] = write_hugging_face(tmp_path / "bare")
        (paths["BARE"] / "tokenizer.json").unlink()
    assert cli.main([str(paths.get(word, word)) for word in argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("mmm: error: ")
    assert not (tmp_path / "out").exists()


END = 0


def writer(bars, monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return TextWriter(ByteTokenizer(), (END,), bars)


def test_text_comes_with_each_token(monkeypatch):
    stdout = io.StringIO()
    written = writer(False, monkeypatch, stdout)
    seen = []
    written.begin(b"a")
    for token in b"\xc3\xb6b\x1b\xff\0":
        seen.append(stdout.getvalue())
        written.add(token, [])
    written.end()
    assert seen == ["a", "a", "aö", "aöb", "aöb\x1b", "aöb\x1b"]
    assert stdout.getvalue() == "aöb\x1b\ufffd\n"
