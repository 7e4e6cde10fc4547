"""Cores that a process may use: those that it is bound to, or fewer where a control group has a quota."""

import os

import pytest

from mmm_launch.contract import usable_cores


def v1(group, quota, period=100000):
    """The two files of a group of version 1."""
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": f"{period}\n"}


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
    "version 1, in a container that the kernel calls by a name from outside": (
        "9:memory:/docker/f00d\n4:cpu,cpuacct:/docker/f00d\n",
        v1("cpu", 100000),
    ),
    "version 1, the group of a job above the process's own": (
        "4:cpu,cpuacct:/slurm/job_7/step_0\n0::/\n",
        v1("cpu/slurm/job_7/step_0", -1) | v1("cpu/slurm/job_7", 100000) | v1("cpu", -1),
    ),
    "version 1, a tree that is not called cpu": ("4:cpuacct,cpu:/a\n", v1("cpuacct,cpu/a", 150000)),
    "version 1, another period": ("2:cpu:/a\n", v1("cpu/a", 75000, 50000)),
    "both versions, version 1 the lower": (
        "2:cpu:/a\n0::/b\n",
        v1("cpu/a", 100000) | {"b/cpu.max": "300000 100000\n"},
    ),
    "both versions, version 2 the lower": (
        "2:cpu:/a\n0::/b\n",
        v1("cpu/a", 300000) | {"b/cpu.max": "100000 100000\n"},
    ),
}
# Control groups that take no core away: what /proc says, and their files.
ALL_CORES = {
    "no control groups": (None, {}),
    "version 2, no quota": ("0::/a\n", {"a/cpu.max": "max 100000\n"}),
    "more than there are": ("0::/\n", {"cpu.max": "900000 100000\n"}),
    "of another group": ("0::/a\n", {"b/cpu.max": "100000 100000\n"}),
    "version 1, no quota": ("2:cpu:/a\n", v1("cpu/a", -1) | v1("cpu", -1)),
    "version 1, of another tree": ("3:cpuset:/a\n2:cpu:/\n", v1("cpu/a", 100000) | v1("cpuset/a", 100000)),
}


@pytest.fixture
def count(tmp_path, monkeypatch):
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
        return usable_cores(tmp_path)

    return make


@pytest.mark.parametrize("groups", ONE_CORE.values(), ids=ONE_CORE)
def test_a_quota_of_one_core(count, groups):
    assert count(*groups) == 1


@pytest.mark.parametrize("groups", ALL_CORES.values(), ids=ALL_CORES)
def test_no_quota(count, groups):
    assert count(*groups) == 4
