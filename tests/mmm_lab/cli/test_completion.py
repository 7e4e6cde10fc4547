"""mmm --print-completion, in a real bash."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from mmm_lab.cli import completion
from mmm_lab.cli import main as cli
from mmm_lab.cli.main import SUBCOMMANDS
from support.clock import PATIENCE

# Completes the words of a line; the last one is the one that is being typed.
ASK = """
. "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_mmm_complete
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "mmm.bash"
    command = [sys.executable, "-m", "mmm_lab.cli.main", "--print-completion"]
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return path


def completed(script, line):
    """The words that bash offers at the end of a line."""
    command = ["bash", "-c", ASK, "bash", script, *line.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_script_of_two_commands_and_one_program(tmp_path, monkeypatch):
    monkeypatch.setattr(completion, "runnable_modules", lambda: {"mmm.trainer.cnn": ""})
    path = tmp_path / "mmm.bash"
    path.write_text(completion.script(["runs", "rerun"], cli.main))
    assert completed(path, "mmm r") == ["runs", "rerun"]
    assert completed(path, "mmm runs --rev") == ["--reverse"]
    assert completed(path, "launch python3 -m mmm.trainer.cnn --optimizer l") == ["lars", "lamb"]
    assert completed(path, "launch python3 -m mmm.trainer.cnn --no_pl") == ["--no_plots"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mmm rer", ["rerun"]),
        ("mmm --v", ["--version"]),
        ("mmm runs --s", ["--sort"]),
        ("mmm runs outputs --rev", ["--reverse"]),
        ("/opt/bin/mmm rerun RUN --dry", ["--dry-run"]),
        ("mmm plan --dtype ", ["bf16", "fp32", "fp64"]),
        ("mmm submit --site pe", ["perlmutter"]),
        ("launch --dev", ["--device"]),
        ("launch --device c", ["cpu", "cuda"]),
        ("launch -n 2 python3 -m mmm.trainer.l", ["mmm.trainer.lm"]),
        ("launch -n 2 python3 -m mmm.trainer.lm --pa", ["--pack", "--parallel"]),
        ("launch -n 2 python3 -m mmm.trainer.lm --parallel z", ["zero1", "zero2", "zero3"]),
        ("launch -n 2 python3 -m mmm.trainer.lm --parallel = z", ["zero1", "zero2", "zero3"]),
        ("launch -n 2 python3 -m mmm.trainer.lm --cp_style =", ["ring", "ulysses", "usp"]),
        ("launch python3 -m mmm.trainer.cnn --no_pl", ["--no_plots"]),
        ("launch python3 -m mmm.trainer.vit --tp", ["--tpsize", "--tp"]),
        ("launch python3 -m mmm.examples.fsdp_tp --br", ["--break"]),
        ("launch python3 -m mmm.examples.vit --conf", ["--config"]),
        ("mmm dry-run 8 -- python3 -m mmm.trainer.vit --lr_", ["--lr_schedule"]),
        ("mmm submit -N 2 -- launch --cpu", ["--cpu-bind"]),
        # Flags without an effect in a program, and what is not ours: bash then completes names of files.
        ("launch python3 -m mmm.trainer.lm --gam", []),
        ("launch python3 train.py --lr", []),
        ("launch python3 -m mmm.trainer.lm --text ", []),
        ("launch python3 -m mine --lr", []),
    ],
)
def test_words_that_bash_offers(script, line, words):
    assert completed(script, line) == words


@pytest.mark.long
def test_every_subcommand_has_its_flags(script):
    for name in SUBCOMMANDS:
        assert "--help" in completed(script, f"mmm {name} --"), name
    assert set(SUBCOMMANDS) <= set(completed(script, "mmm "))


@pytest.mark.long
def test_both_commands_are_registered(script):
    done = subprocess.run(["bash", "-c", f". {script}; complete -p mmm launch"], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"complete -o default -F _mmm_complete {name}" for name in ("mmm", "launch")]


@pytest.mark.long
def test_a_press_of_tab(script, tmp_path):
    """In an interactive bash, on a terminal."""
    bash = ["bash", "--norc", "--noprofile", "-i"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe(bash[0], bash, os.environ | {"TERM": "dumb", "PS1": "> "})
    os.write(terminal, f". {script}; echo re''ady\n".encode())
    read_until(terminal, b"ready")
    os.write(terminal, b"mmm exerc\t")
    try:
        read_until(terminal, b"mmm exercise ")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def read_until(terminal, text):
    screen = b""
    end = time.monotonic() + PATIENCE
    while text not in screen:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, screen
        screen += os.read(terminal, 4096)


def test_one_flag_is_not_enough_for_another(capsys):
    assert cli.main(["--print-complete"]) == 2
    assert "--print-completion" in capsys.readouterr().err
