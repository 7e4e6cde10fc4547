"""The package as a whole: light to import, quick to answer. `make lint` checks what may import what. The names that
launch and the programs agree on are the same in both. Cores are counted that a process may use under a quota."""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mmm.runtime import contract as of_programs
from mmm.runtime import cores as cores_of_programs
from mmm_launch import contract as of_launch
from mmm_launch import cores as cores_of_launch
from support.clock import PATIENCE, children_cpu

SOURCE = Path(__file__).parent.parent / "src"


@pytest.mark.parametrize("package", ["checkpoint", "data", "examples._support", "history", "parallel", "trainer"])
def test_a_package_that_loads_lazily(package):
    """Each of its names is there, and none of them hides a module."""
    loaded = importlib.import_module(f"mmm.{package}")
    assert dir(loaded)
    for name in dir(loaded):
        assert not isinstance(getattr(loaded, name), ModuleType), name


def test_import_is_light():
    code = (
        "import sys, time; begin = time.perf_counter(); import mmm; seconds = time.perf_counter() - begin; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(seconds)"
    )
    best = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert best < 0.05


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "mmm_launch", "--help"],
        ["-m", "mmm_lab.cli.main", "--help"],
        ["-m", "mmm_lab.cli.main", "examples"],
        ["-m", "mmm.examples"],
        ["-m", "mmm.examples", "--help"],
        ["-m", "mmm_lab.cli.main", "--version"],
        ["-m", "mmm_lab.parity", "--help"],
        ["-m", "mmm_lab.parity", "--dry_run"],
    ],
    ids=lambda c: " ".join(c[1:]),
)
def test_answers_at_once_and_without_torch(command, tmp_path):
    """A torch that cannot be imported stands first on the path: nothing may need it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {"PYTHONPATH": f"{tmp_path}:{SOURCE}", "PATH": "/usr/bin:/bin"}
    seconds = []
    for _ in range(2):
        begin = children_cpu()
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=PATIENCE)
        seconds.append(children_cpu() - begin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert min(seconds) < 1.0


def test_list_of_examples():
    done = subprocess.run([sys.executable, "-m", "mmm.examples"], capture_output=True, text=True, check=True)
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("mmm."))
    assert listed["mmm.examples.fsdp_tp"].startswith("Two-dimensional parallelism")
    names = "ddp zero hsdp tensor_parallel pipeline context_parallel parallel_4d collectives traffic moe tiling"
    assert {f"mmm.examples.{name}" for name in (*names.split(), "checkpoint")} < set(listed)
    assert {f"mmm.trainer.{name}" for name in ("lm", "vit", "cnn")} < set(listed)


def test_unknown_subcommand():
    done = subprocess.run([sys.executable, "-m", "mmm_lab.cli.main", "histroy"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'histroy'" in done.stderr
    assert "history?" in done.stderr


CONSTANTS = [name for name in vars(of_programs) if name.isupper() and hasattr(of_launch, name)]


def test_both_sides_agree():
    assert "VERDICT_VARIABLE" in CONSTANTS
    for name in CONSTANTS:
        assert getattr(of_launch, name) == getattr(of_programs, name), name


def test_a_report_that_a_program_sends_is_read_by_launch(monkeypatch):
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(of_launch.SOCKET_VARIABLE, "")
    assert not of_programs.report("user", "nobody listens", 2)
    of_launch.attach(here.detach())
    assert of_programs.report("user", "too many heads", 2)
    report = of_launch.Report.loads(there.recv(1 << 16))
    assert (report.rank, report.kind, report.text, report.exit_code) == (3, "user", "too many heads", 2)
    if os.fork() == 0:  # not the rank itself: a process that it started
        os._exit(int(of_programs.report("user", "from a child", 2)))
    assert os.wait()[1] == 0


SLURM = "slurmstepd.scope/job_7"
# The kernel's /proc/self/cgroup, and files under /sys/fs/cgroup. Each of them allows one core of four.
ONE_CORE = {
    "version 2, at the root of a container": ("0::/\n", {"cpu.max": "100000 100000\n"}),
    "version 2, the group of a job above the process's own": (
        f"0::/{SLURM}/step_0\n",
        {f"{SLURM}/step_0/cpu.max": "max 100000\n", f"{SLURM}/cpu.max": "100000 100000\n", "cpu.max": "max 100000\n"},
    ),
    "version 2, the lowest of several": ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "190000 100000"}),
    "less than one": ("0::/\n", {"cpu.max": "20000 100000\n"}),
}
ALL_CORES = {
    "no control groups": (None, {}),
    "version 2, no quota": ("0::/a\n", {"a/cpu.max": "max 100000\n"}),
    "more than there are": ("0::/\n", {"cpu.max": "900000 100000\n"}),
    "of another group": ("0::/a\n", {"b/cpu.max": "100000 100000\n"}),
}


@pytest.fixture(params=[cores_of_launch, cores_of_programs], ids=["launch", "mmm"])
def count(request, tmp_path, monkeypatch):
    """Cores on a host whose process may use four CPUs, with these control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 4, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def make(kernels, files):
        if kernels is not None:
            (tmp_path / "proc/self").mkdir(parents=True)
            (tmp_path / "proc/self/cgroup").write_text(kernels)
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return request.param.usable_cores(tmp_path)

    return make


@pytest.mark.parametrize("groups", ONE_CORE.values(), ids=ONE_CORE)
def test_a_quota_of_one_core(count, groups):
    assert count(*groups) == 1


@pytest.mark.parametrize("groups", ALL_CORES.values(), ids=ALL_CORES)
def test_no_quota(count, groups):
    assert count(*groups) == 4
