"""docs/from-the-talks.md: its rows are counted, and some of their commands run. That each takes its flags, and where
links lead, is tested with all pages (tests/docs)."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmm_lab.cli.main import main as mmm
from mmm_launch.main import main as launch
from support.clock import PATIENCE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from-the-talks.md").read_text(encoding="utf-8")
# The rows of the page's table.
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
COMMANDS = list(dict.fromkeys(command for row in ROWS for command in re.findall(r"`([^`]+)`", row[3])))
QUICK = re.compile(r"mmm (machine \w|plan --model gpt2 --nhosts 1)|launch --dry-run ")
LONG = re.compile(
    r"launch -n [24] --device cpu .*(ddp|fsdp_tp|cnn) .*--max_iters [13]\b|mmm plan --model llama-8b .*--hosts"
)


def test_rows_are_numbered_and_counted():
    assert [int(row) for row, *_ in ROWS] == list(range(1, len(ROWS) + 1))
    assert f"This page has {len(ROWS)} rows" in PAGE
    assert len(ROWS) >= 188
    cut = [line for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    assert len(cut) == len(ROWS), "a row that is not read: four cells, and no | in one"


def test_each_row_stands_for_something():
    """A command, a page, or a plain "not here"; nothing in part."""
    for row, about, answer, command in ROWS:
        assert "partly" not in about + answer + command, row
        assert command == "—" or re.fullmatch(r"`[^`]+`", command), row
        assert command != "—" or re.search(r"not here|\]\(|scripts/|by hand", answer), row


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
        output = capsys.readouterr().out
    else:
        command = [sys.executable, "-m", "mmm_launch", *rest]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        output = done.stdout
    assert len(output.splitlines()) > 10
