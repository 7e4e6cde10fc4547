"""What this host still has, by files like those of Linux."""

import pytest

from mmm_verify import memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A host with 8 GiB free, and a process in the group /job/step."""
    step = tmp_path / "groups/job/step"
    step.mkdir(parents=True)
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\nSwapFree: 0 kB\n")
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    for folder, limit, used in ((step, "max", 0), (step.parent, str(4 * GIB), 3 * GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 0\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    return tmp_path


def test_the_least_that_a_group_over_it_allows(system):
    assert memory.free_memory() == 2 * GIB


def test_without_groups(system):
    (system / "cgroup").write_text("4:memory:/job/step\n")
    assert memory.free_memory() == 8 * GIB


def test_a_system_that_does_not_tell(system):
    (system / "meminfo").unlink()
    assert memory.free_memory() is None
