"""Optimizer state in a file on a disk: the same updates, little memory, a full disk, and nothing left behind."""

import copy
import errno
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from mmm.errors import ConfigError
from mmm.parallel.memory import disk
from mmm.parallel.memory.disk import MOMENTS, DiskAdamW, check_disk, file_system, units_of
from mmm.parallel.memory.offload import disk_of
from mmm.parallel.optimizer import make_optimizer
from mmm.trainer.config.command_line import with_values

WIDTH = 1024


def net(layers=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def optimizer_of(model, folder=None):
    plain = make_optimizer("adamw", model.parameters(), 1e-2)
    return plain if folder is None else DiskAdamW(plain, folder)


def step(model, optimizer, seed):
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(disk, "UNIT", 1 << 20)


def test_the_same_updates(tmp_path, small_units):
    a, b = net(), net()
    plain, filed = optimizer_of(a), optimizer_of(b, tmp_path)
    assert len(filed.param_groups) > len(plain.param_groups)
    for seed in range(3):
        step(a, plain, seed)
        step(b, filed, seed)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert [*tmp_path.iterdir()] == []  # the file has no name


def test_a_state_is_loaded_into_the_file(tmp_path, small_units):
    a, b = net(), net()
    plain = optimizer_of(a)
    step(a, plain, 0)
    b.load_state_dict(a.state_dict())
    filed = optimizer_of(b, tmp_path)
    places = {p: [filed.state[p][key].data_ptr() for key in MOMENTS] for p in b.parameters()}
    states = [copy.deepcopy(plain.state[p]) for p in a.parameters()]
    groups = filed.state_dict()["param_groups"]
    filed.load_state_dict({"state": dict(enumerate(states)), "param_groups": groups})
    assert {p: [filed.state[p][key].data_ptr() for key in MOMENTS] for p in b.parameters()} == places
    for seed in (1, 2):
        step(a, plain, seed)
        step(b, filed, seed)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_units():
    parameters = [torch.nn.Parameter(torch.empty(n, dtype=torch.float32)) for n in (100, 100, 300, 10, 10)]
    with patch.object(disk, "UNIT", 1600):
        assert [[p.numel() for p in unit] for unit in units_of(parameters)] == [[100, 100], [300], [10, 10]]


def resident(kind):
    """Bytes of this process by the kernel: of anonymous memory, of files."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", text)[1])


def grown(rank, folder, layers):
    """How many bytes more of anonymous memory, and of files, there are after two steps than after backward."""
    disk.UNIT = 1 << 22
    model = net(layers)
    optimizer = optimizer_of(model, folder)
    model(torch.randn(2, WIDTH)).sum().backward()
    kinds = ("RssAnon", "RssFile", "RssShmem")
    before = [resident(kind) for kind in kinds]
    optimizer.step()
    optimizer.step()
    anonymous, *filed = (resident(kind) - was for kind, was in zip(kinds, before, strict=True))
    return anonymous, sum(filed)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells on Linux")
def test_resident_memory(run_on_ranks, tmp_path):
    """Of 64 MB of moments none is anonymous, and after the step nothing of the file is resident."""
    moments = 8 * 2 * WIDTH**2 * 4
    (in_memory, _), (anonymous, filed) = (run_on_ranks(grown, 1, folder, 8)[0] for folder in (None, tmp_path))
    assert in_memory > 0.9 * moments
    assert anonymous < 0.1 * moments
    assert filed < 0.1 * moments


def test_a_full_disk(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(disk, "_allocate", side_effect=full), pytest.raises(ConfigError) as refused:
        optimizer_of(net(), tmp_path)
    text = str(refused.value)
    assert f"disk:{tmp_path}: this rank's optimizer state takes 16.79 MB, and the disk has" in text
    assert "MB left (No space left on device): name another folder" in text
    assert [*tmp_path.iterdir()] == []


def test_blocks_are_allocated_beforehand(tmp_path):
    filed = optimizer_of(net(), tmp_path)
    (descriptor,) = (
        name for name in os.listdir("/proc/self/fd") if str(tmp_path) in str(os.path.realpath(f"/proc/self/fd/{name}"))
    )
    about = os.stat(f"/proc/self/fd/{descriptor}")
    assert about.st_blocks * 512 >= len(filed.file.pages)
    assert about.st_mode & 0o777 == 0o600


def test_refused(tmp_path, monkeypatch):
    for word in ("disk:", "floppy"):
        with pytest.raises(ConfigError, match=f"{word}"):
            disk_of(word)
    assert [disk_of(kind) for kind in (False, True, "", "host")] == [None] * 4
    assert disk_of("disk:/local/scratch") == Path("/local/scratch")
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_disk(tmp_path / "gone")
    if Path("/proc/self").exists():
        with pytest.raises(ConfigError, match="no file can be made there"):
            check_disk(Path("/proc"))
        assert file_system(Path("/proc")) == "proc"
    check_disk(tmp_path)
    monkeypatch.setattr(disk, "file_system", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="nfs4"):
        check_disk(tmp_path)


def test_the_flag_alone_is_the_host():
    assert with_values(["--offload", "--pp", "2"]) == ["--offload", "host", "--pp", "2"]
    assert with_values(["--pp", "2", "--offload"]) == ["--pp", "2", "--offload", "host"]
    for value in ("host", "disk:/x"):
        assert with_values(["--offload", value]) == ["--offload", value]
    assert with_values(["--offload=disk:/x"]) == ["--offload=disk:/x"]
