"""``mmm dry-run`` as a command: whatever program it is given."""

import re
from pathlib import Path

import pytest

from mmm.errors import ConfigError
from mmm_lab.cli import main as cli
from mmm_lab.cli.dry_run import target_of
from mmm_launch.errors import LaunchError

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "your-script.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "python3"),
        ("launch -n 4 python3 t.py", "launch: give only the Python program, and nothing that starts ranks"),
        ("bash t.sh", "bash: give only the Python program"),
    ],
)
def test_what_is_no_program(argv, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        target_of(argv.split())


def test_a_program_that_is_not_there():
    with pytest.raises(LaunchError, match=r"Did you mean mmm\.examples\.fsdp_tp\?"):
        target_of(["python3", "-m", "mmm.examples.fsdp_pt"])
    with pytest.raises(LaunchError, match=r"no such script: .*no_such\.py"):
        target_of(["no_such.py"])


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capfd):
    """What ``mmm dry-run`` in an empty folder ends with: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def end(*argv):
        code = cli.main(["dry-run", *argv])
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


TRAINS = """
import torch
weights = torch.zeros(3)
open("began", "w").close()
torch.save(weights, "model.pt")
"""
IMPORTS = "from mmm.trainer import start_run\n"


@pytest.mark.parametrize(
    ("command", "source", "named"),
    [
        # Neither of these names `start_run`: they are refused by their source.
        ("train.py", TRAINS, "start_run"),
        ("train.py", "import other\nfrom pack import other as second\n", "start_run"),
        ("-m pack.other", "", "start_run"),
        ("-c open('began','w')", "", "start_run"),
        # The others are stopped by what they do first, also if they catch every exception.
        ("train.py", "import importlib\nimportlib.import_module('other')\n", "began"),
        ("train.py", f"{IMPORTS}import other\n", "began"),
        ("train.py", f"{IMPORTS}open('log.txt', 'a')\n", "log.txt"),
        (
            "train.py",
            f"{IMPORTS}try:\n    open('x.txt', 'w')\nexcept BaseException:\n    open('y.txt', 'w')\n",
            "x.txt",
        ),
        ("train.py", f"{IMPORTS}import torch\ntorch.save(torch.zeros(3), 'model.pt')\n", "model.pt"),
        ("train.py", f"{IMPORTS}import h5py\nh5py.File('data.h5', 'w')\n", "data.h5"),
        ("train.py", f"{IMPORTS}import os\nos.remove('other.py')\n", "remove other.py"),
        ("train.py", f"{IMPORTS}import os\nos.rename('other.py', 'lost.py')\n", "other.py"),
        ("train.py", f"{IMPORTS}import shutil\nshutil.rmtree('pack')\n", "remove"),
        ("train.py", f"{IMPORTS}import os\nos.makedirs('runs/new')\n", "remove runs, and"),
        ("train.py", f"{IMPORTS}import subprocess\nsubprocess.run(['touch', 'began'])\n", "start touch"),
    ],
)
def test_a_program_that_would_do_its_work_for_real_does_none_of_it(dry_run, command, source, named):
    """The folder is as it was: no file more, none less, none changed."""
    Path("pack").mkdir()
    for path in (Path("other.py"), Path("pack", "other.py")):
        path.write_text(TRAINS)
    Path("train.py").write_text(source)
    before = {path: path.read_text() for path in Path().rglob("*.py")}
    code, out, err = dry_run("4", "--", *command.split(maxsplit=1))
    assert (code, out) == (2, "")
    assert named in err
    assert "docs/your-script.md" in err
    assert "mmm verify --program" in err
    assert {path: path.read_text() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["4", "--compare", "train.py"], "no program to run: give it after --"),
        (["4", "--compares", "--", "train.py"], "Did you mean --compare?"),
    ],
)
def test_a_program_or_a_flag_that_stands_on_the_wrong_side(dry_run, argv, message):
    """A program before -- was an unrecognized argument, and nothing said where it goes."""
    code, _, err = dry_run(*argv)
    assert code == 2
    assert message in err


def test_a_drawing_does_not_train_either(dry_run):
    Path("train.py").write_text(TRAINS)
    assert cli.main(["draw", "train.py"]) == 2
    assert [path.name for path in Path().iterdir()] == ["train.py"]


@pytest.mark.parametrize("command", ["script.py", "-m package.module"])
def test_a_run_that_another_module_starts(dry_run, command):
    """The program's own text does not name `start_run`, and its files of the time before the run are temporary."""
    (code,) = re.findall(r"```python\n(# denoise\.py\n.*?)```", PAGE, re.DOTALL)
    main = (
        "\nimport os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    open(f'{folder}/x', 'w').close()\n"
    )
    main += "os.makedirs('package', exist_ok=True)\nrun_main(lambda: train(parse(Config, '')))\n"
    Path("package").mkdir()
    Path("package", "program.py").write_text(code)
    Path("package", "module.py").write_text("from .program import *\n" + main)
    Path("script.py").write_text("from package.program import *\n" + main)
    code, out, err = dry_run("2", "--", *command.split(), "--steps", "2", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "dry run of 2 ranks" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero", "this program trains several models in one run"),
        ("tiling", "this program trains several models in one run"),
        ("traffic", "this program trains several models in one run"),
        ("parallel_4d", "PipelineStage"),
        ("checkpoint", "the program saves a checkpoint by torch.distributed.checkpoint"),
        ("collectives", "the program made no model"),
    ],
)
def test_a_run_that_cannot_be_tried(dry_run, name, message):
    code, _, err = dry_run("8", "--", "-m", f"mmm.examples.{name}", "--device", "cpu")
    assert code == 2, err
    assert message in err


def script_of(page):
    """The script that a page of docs/scripts is about."""
    text = (DOCS / "scripts" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```python\n(# {page}\.py\n.*?)```", text, re.DOTALL)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "flags", "code", "message"),
    [
        # Its batches come from NumPy: they were floats, and an embedding takes integers.
        ("lengths", ["--steps", "2"], 0, "needs"),
        ("gan", [], 2, "this program trains several models in one run"),
        ("graphs", [], 2, "nonzero"),
    ],
)
def test_scripts_of_the_pages_run_or_are_refused_by_name(dry_run, page, flags, code, message):
    Path("script.py").write_text(script_of(page))
    ended, out, err = dry_run("2", "--", "script.py", *flags, "--device", "cpu")
    assert ended == code, err
    assert message in out + err
