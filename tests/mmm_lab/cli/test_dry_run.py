"""``mmm dry-run`` as a command: whatever program it is given."""

import re
from pathlib import Path

import pytest

from mmm.errors import ConfigError
from mmm_lab.cli import main as cli
from mmm_lab.cli.dry_run import target_of
from mmm_launch.errors import LaunchError

PAGE = (Path(__file__).parent.parent.parent.parent / "docs" / "your-script.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "python3"),
        ("launch -n 4 python3 t.py", "launch starts ranks, and a dry run needs none: give only the program"),
        ("bash t.sh", "bash: it is not a Python program, and only those can be tried"),
    ],
)
def test_what_is_no_program(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        target_of(words.split())


def test_a_program_that_is_not_there():
    with pytest.raises(LaunchError, match=r"Did you mean mmm\.examples\.fsdp_tp\?"):
        target_of(["python3", "-m", "mmm.examples.fsdp_pt"])
    with pytest.raises(LaunchError, match=r"no such script: .*no_such\.py"):
        target_of(["no_such.py"])


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capfd):
    """What ``mmm dry-run`` in an empty folder ends with: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def end(*words):
        code = cli.main(["dry-run", *words])
        return code, *capfd.readouterr()

    return end


def test_a_script_of_ones_own(dry_run):
    """That of docs/your-script.md."""
    (code,) = re.findall(r"```python\n(# denoise\.py\n.*?)```", PAGE, re.DOTALL)
    Path("denoise.py").write_text(code)
    asked = ["6", "--rank", "4", "--memory", "1GiB"]
    code, out, err = dry_run(*asked, "--", "denoise.py", "--tp", "2", "--steps", "3", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "dry run of 6 ranks, layout dp3·tp2, cpu, fp32: 1 of them" in out
    assert "fits: rank 4 needs" in out
    assert [path.name for path in Path().iterdir()] == ["denoise.py"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero", "this program trains several models in one run, one after another; try only one of them"),
        ("tiling", "this program trains several models in one run"),
        ("checkpoint", "the program saves a checkpoint by torch.distributed.checkpoint"),
        ("collectives", "the program made no model"),
    ],
)
def test_a_run_that_cannot_be_tried(dry_run, name, message):
    code, _, err = dry_run("4", "--", "-m", f"mmm.examples.{name}", "--device", "cpu")
    assert code == 2, err
    assert f"{message}" in err
