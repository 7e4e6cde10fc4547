"""How much memory is left: of the host, and within control groups, from made-up system files."""

import pytest
import torch

from mmm.runtime.memory import device_memory, host_memory

GB = 10**9
MEMINFO = f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {40 * GB // 1024} kB\nSwapFree: {2 * GB // 1024} kB\n"


def system(root, files):
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


def group(folder, limit, used, cached):
    stat = f"anon 5\nactive_file {cached}\ninactive_file 0\n"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 42),
        ({"proc/self/cgroup": "0::/\n"}, 42),
        ({"proc/self/cgroup": "0::/job/step\n", **group("sys/fs/cgroup/job/step", "max", GB, 0)}, 42),
        ({"proc/self/cgroup": "0::/job/step\n", **group("sys/fs/cgroup/job", 8 * GB, 3 * GB, GB)}, 8),
        ({"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", 8 * GB, 3 * GB, 0)}, 7),
        ({"proc/self/cgroup": "0::/job\n", **group("sys/fs/cgroup/job", 80 * GB, 3 * GB, GB)}, 42),
    ],
)
def test_host(tmp_path, files, left):
    assert host_memory(system(tmp_path, files)) == pytest.approx(left * GB, abs=4096)


def test_nothing_is_told(tmp_path):
    assert host_memory(tmp_path) is None
    assert device_memory(torch.device("cpu")) is None


def test_here():
    assert host_memory() > 10**8
