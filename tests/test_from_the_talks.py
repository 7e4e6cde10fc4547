"""docs/from-the-talks.md: its rows are counted, its commands are there and take their flags, and some of them run."""

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmm.cli.main import SUBCOMMANDS
from mmm.cli.main import main as mmm
from mmm.history.trackers import PACKAGES
from mmm.launch.main import main as launch
from mmm.launch.plan.options import launch_options, parser, split
from mmm.trainer import vit  # which mmm.examples.vit is
from mmm.trainer.config.command_line import parse
from support.clock import PATIENCE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from-the-talks.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
COMMANDS = list(dict.fromkeys(command for row in ROWS for command in re.findall(r"`([^`]+)`", row[3])))
STARTERS = ("mpiexec", "srun", "torchrun")
QUICK = re.compile(r"mmm (machine \w|plan --model gpt2 --hosts 1)|launch --dry-run ")
LONG = re.compile(
    r"launch -n [24] --device cpu .*(ddp|fsdp_tp|cnn) .*--max_iters [13]\b|mmm plan --model llama-8b .*--hosts"
)


class Parsed(Exception):
    """A command line is right; nothing is done about it."""


@pytest.fixture
def parses(monkeypatch):
    """`check_line` of a command, without what it would do."""
    parse_args = argparse.ArgumentParser.parse_args

    def and_no_more(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed

    def checked(line):
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", and_no_more)
            patch.setattr("mmm.history.trackers.PACKAGES", dict.fromkeys(PACKAGES, "json"))  # as if installed
            check_line(shlex.split(line), patch)

    return checked


def parse_alone(call):
    try:
        code = call()
    except Parsed:
        return
    raise AssertionError(f"nothing is parsed, or wrongly: exit code {code}")


def check_line(words, patch):
    """AssertionError, SystemExit with a code, or the program's own error: a program or a flag that is not there."""
    program, rest = words[0], words[1:]
    if program == "launch":
        given, command = split(rest)
        parse_alone(lambda: launch_options(parser().parse_args(given)))
        check_line(command, patch)
    elif program in STARTERS:
        inner = rest.index("-m") if program == "torchrun" else rest.index("python3") + 1
        check_line(["python3", *rest[inner:]], patch)
    elif program == "python3":
        assert rest[0] == "-m"
        check_module(rest[1], rest[2:], patch)
    elif program == "mmm":
        assert rest[0] in SUBCOMMANDS
        parse_alone(lambda: mmm(rest))
        if rest[0] == "dry-run":
            check_line(rest[rest.index("--") + 1 :], patch)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    else:  # a name in Python
        assert not rest
        module, _, name = program.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def check_module(module, flags, patch):
    if not module.startswith("mmm."):  # one that runs another
        assert importlib.util.find_spec(module) is not None
        check_module(flags[flags.index("-m") + 1], flags[flags.index("-m") + 2 :], patch)
        return
    found = importlib.import_module("mmm.parity.__main__" if module == "mmm.parity" else module)
    patch.setattr(sys, "argv", [module, *flags])
    config = found.Options if module == "mmm.parity" else getattr(found, "Config", vit.Config)
    if "--help" in flags:
        with pytest.raises(SystemExit, match="0"):
            parse(config)
    else:
        parse(config)


def test_rows_are_numbered_and_counted():
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1))
    assert f"This page has {len(ROWS)} rows" in PAGE
    assert len(ROWS) >= 188
    cut = [line for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    assert len(cut) == len(ROWS), "a row that is not read: four cells, and no | in one"


def test_each_row_stands_for_something():
    """A command, a page, or a plain "not here"; nothing in part."""
    for number, about, here, command in ROWS:
        assert "partly" not in about + here + command, number
        assert command == "—" or re.fullmatch(r"`[^`]+`", command), number
        assert command != "—" or re.search(r"not here|\]\(|scripts/|by hand", here), number


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", PAGE))))
def test_its_links_lead_somewhere(target):
    name, _, heading = target.partition("#")
    page = (ROOT / "docs" / name).read_text(encoding="utf-8") if name else PAGE
    heads = [
        re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-").lower() for head in re.findall(r"^#+ (.+)$", page, re.M)
    ]
    assert not heading or heading in heads


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_there_and_takes_its_flags(line, parses):
    parses(line)


@pytest.mark.parametrize(
    "line",
    [
        "launch --nprocs 2 python3 -m mmm.examples.ddp",
        "launch -n 2 python3 -m mmm.examples.ddpp",
        "launch -n 2 --device cpu python3 -m mmm.trainer.lm --tpp 2",
        "launch -n 2 python3 -m mmm.trainer.lm --schedule 2F2B",
        "python3 -m mmm.examples.ddp --break nothing",
        "python3 -m mmm.parity --layouts dp2",
        "mpiexec -n 2 python3 -m mmm.examples.fsdp --epoch x",
        "mmm planned --model gpt2",
        "mmm plan --modell gpt2",
        "mmm dry-run 8 -- python3 -m mmm.trainer.lm --tp two",
        "make tests",
        "mmm.history.loads",
    ],
)
def test_a_wrong_one_is_seen(line, parses, capsys):
    with pytest.raises((Exception, SystemExit)) as caught:
        parses(line)
    assert not isinstance(caught.value, Parsed)


@pytest.mark.parametrize("line", filter(QUICK.match, COMMANDS))
def test_some_run_at_once(line, capsys):
    program, *rest = shlex.split(line)
    assert (launch if program == "launch" else mmm)(rest) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.long
@pytest.mark.parametrize("line", filter(LONG.match, COMMANDS))
def test_some_run_for_seconds(line, tmp_path, monkeypatch, capsys):
    program, *rest = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    if program == "mmm":
        assert mmm(rest) == 0
        said = capsys.readouterr().out
    else:
        command = [sys.executable, "-m", "mmm.launch", *rest]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout
    assert len(said.splitlines()) > 10
