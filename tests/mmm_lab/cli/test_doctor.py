"""``mmm doctor`` as a command: exit codes, --json, and a broken torch."""

import json
import os
import signal
import subprocess
import sys

import pytest

from support.clock import PATIENCE
from support.processes import wait_for, wait_for_ends
from support.signals import as_from_a_terminal

COMMAND = [sys.executable, "-m", "mmm_lab.cli.main", "doctor"]


def environment(**variables):
    places = [variables.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **variables}


def doctor(folder, *flags, **variables):
    how = {"cwd": folder, "env": environment(**variables), "capture_output": True, "text": True, "timeout": PATIENCE}
    return subprocess.run([*COMMAND, *flags], **how)


def test_a_broken_torch_is_reported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    done = doctor(tmp_path, "--json", PYTHONPATH=str(tmp_path))
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert found["torch"]["status"] == found["devices"]["status"] == found["collectives"]["status"] == "fail"
    assert "libtorch_cpu.so: cannot open" in found["torch"]["seen"]
    assert found["torch"]["fix"]
    assert found["outdir"]["status"] == "ok"
    assert set(found["python"]) == {"name", "status", "seen", "fix"}


@pytest.mark.long
def test_a_torch_that_leaves_or_hangs(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('no')")
    done = doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "FAIL  torch" in done.stdout
    assert "SystemExit: no" in done.stdout
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    done = doctor(tmp_path, "--timeout", "0.5", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "gave no answer in 2 s" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_wrong_flags(tmp_path):
    assert doctor(tmp_path, "--timeout", "0").returncode == 2
    assert doctor(tmp_path, "--jsn").returncode == 2


@pytest.mark.long
def test_this_machine(tmp_path):
    done = doctor(tmp_path, "--json", "--outdir", str(tmp_path / "runs"))
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["torch"]["status"] == found["matmul cpu"]["status"] == found["all-reduce cpu"]["status"] == "ok"
    assert str(tmp_path / "runs") in found["outdir"]["seen"]
    done = doctor(tmp_path, TORCH_LOGS="")
    assert done.returncode == 1
    assert "unset TORCH_LOGS" in done.stdout


@pytest.mark.long
def test_warnings_are_no_failure(tmp_path):
    old = {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    (tmp_path / "nodes").write_text("localhost\nno-such-host.invalid\n")
    done = doctor(tmp_path, **old)
    assert done.returncode == 0, done.stdout
    assert "warn  hosts" in done.stdout


@pytest.mark.parametrize(
    ("number", "says", "code"), [(signal.SIGINT, "mmm: interrupted\n", 130), (signal.SIGKILL, "", -9)]
)
def test_interrupted_or_killed_it_leaves_nothing(tmp_path, number, says, code):
    (tmp_path / "pids").mkdir()
    text = "import os, time\nopen('pids/torch', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    (tmp_path / "torch.py").write_text(text)
    how = {"env": environment(PYTHONPATH=str(tmp_path)), "stderr": subprocess.PIPE, "preexec_fn": as_from_a_terminal()}
    process = subprocess.Popen(COMMAND, cwd=tmp_path, text=True, **how)
    wait_for(tmp_path / "pids", 1)
    process.send_signal(number)
    assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (says, code)
    wait_for_ends(tmp_path / "pids")
