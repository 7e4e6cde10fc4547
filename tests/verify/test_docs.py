"""The program of docs/verify.md prints what the page says."""

import re
from pathlib import Path

import pytest

from mmm.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```\n\$ mmm (verify [^\n]*)\n(.*?)```", PAGE, re.DOTALL)


def plain(text):
    """Without what rounding decides."""
    return re.sub(r"\d(\.\d+)?e[+-]\d+", "…", text).strip()


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=["same", "not the same"])
def test_output(command, output, tmp_path, monkeypatch, capsys):
    (program,) = re.findall(r"```python\n# mlp\.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mlp.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    code = main(command.split())
    assert plain(capsys.readouterr().out) == plain(output)
    assert code == (0 if output.startswith("same") else 1)
