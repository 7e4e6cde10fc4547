"""The program of docs/verify.md prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmm.cli.main import main
from support.clock import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```\n\$ mmm (verify [^\n]*)\n(.*?)```", PAGE, re.DOTALL)


def plain(text):
    """Without what rounding decides."""
    return re.sub(r"\d(\.\d+)?e[+-]\d+", "…", text).strip()


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=["same", "not the same", "found"])
def test_output(command, output, tmp_path, monkeypatch, capsys):
    (program,) = re.findall(r"```python\n# mlp\.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mlp.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    code = main(command.split())
    assert plain(capsys.readouterr().out) == plain(output)
    assert code == (1 if output.startswith("not") else 0)


@pytest.mark.long
def test_tests(tmp_path):
    """The page's tests pass in a pytest of their own."""
    for name in ("mlp", "test_mlp"):
        (code,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "mmm.testing.plugin", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
