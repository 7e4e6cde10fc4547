"""Copies in the memory of hosts: put together from those that are left, or refused."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.test_checkpoint import full, model
from mmm.checkpoint import Manifest, load_tensors, steps_of, training_state
from mmm.checkpoint.replica import HostMemory, ReplicaSaver


def find(rank, folders):
    """This rank's part of as many hosts as there are folders."""
    folder = folders[rank.rank * len(folders) // rank.world_size]
    folder.mkdir(exist_ok=True)
    return HostMemory.find(folder)


def save(rank, folders, steps=(3,), blocked=None):
    memory, said = find(rank, folders), []
    parameters, buffers, optimizer = model(rank.world_size, step=True)
    before = full(rank, parameters, buffers, optimizer)
    saver = ReplicaSaver(memory.folder, memory.group, 1, None, said.append, what="copy in memory", memory=memory)
    for step in steps:
        if step == blocked and rank.rank == 0:  # where a file of the last rank is to come
            (memory.folder / f"step-{step}.partial" / f"__{rank.world_size - 1}_0.distcp").mkdir(parents=True)
        saver.save(training_state(parameters, buffers, optimizer), Manifest(step, {"dim": 3}, {"rows": step}, {}, {}))
        saver.wait()
    return said, before


def load(rank, folders):
    """The step that is loaded, what is wrong with others, and all tensors."""
    memory, problems = find(rank, folders), []
    for copy in memory.replicas():
        manifest, problem = memory.check(copy)
        if problem is not None:
            problems.append(problem)
            continue
        parameters, buffers, optimizer = model(rank.world_size)
        path = memory.path(copy.step)

        def fetch(names, path=path, files=manifest.files):
            memory.fetch(path, files, names)

        load_tensors(path, manifest.files, parameters, buffers, optimizer, fetch=fetch)
        memory.keep_only(copy.step)
        dist.barrier()
        return manifest.step, problems, full(rank, parameters, buffers, optimizer)
    memory.keep_only(None)
    return None, problems, {}


def hosts_of(tmp_path, names):
    return [tmp_path / name for name in names]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in next(iter(steps_of(folder))).iterdir())


def loaded(results, before, step=3):
    for found, _, tensors in results:
        assert found == step
        assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_one_host_has_it_once(run_on_ranks, tmp_path):
    folders = hosts_of(tmp_path, "a")
    (said, before), *_ = run_on_ranks(save, 4, folders, (3, 6, 9))
    assert said == []
    assert [path.name for path in steps_of(folders[0])] == ["step-9"]
    assert files(folders[0]) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "checkpoint.json"]
    loaded(run_on_ranks(load, 2, folders), before, 9)


def test_each_host_has_the_files_of_the_host_before_it(run_on_ranks, tmp_path):
    folders = hosts_of(tmp_path, "abcd")
    run_on_ranks(save, 4, folders, (3, 6))
    for number, folder in enumerate(folders):
        assert [path.name for path in steps_of(folder)] == ["step-6"]
        names = {f"__{rank}_0.distcp" for rank in (number, (number - 1) % 4)}
        assert set(files(folder)) == {".metadata", "checkpoint.json", *names}


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("a", "bcd"), ("d", "bca"))),
        ("ac", "db"),
        ("b", "xacd"),
    ],
)
def test_hosts_that_are_left_put_it_together(run_on_ranks, tmp_path, lost, left):
    """On as many ranks as hosts that are left; a new host has nothing yet."""
    (_, before), *_ = run_on_ranks(save, 4, hosts_of(tmp_path, "abcd"))
    for name in lost:
        shutil.rmtree(tmp_path / name)
    loaded(run_on_ranks(load, len(left), hosts_of(tmp_path, left)), before)


def test_two_neighbours_are_lost(run_on_ranks, tmp_path):
    run_on_ranks(save, 4, hosts_of(tmp_path, "abcd"))
    for step, problems, _ in run_on_ranks(load, 2, hosts_of(tmp_path, "ad")):
        assert (step, problems) == (None, ["no host that is left has __1_0.distcp of the copy of step 3 in memory"])
    assert steps_of(tmp_path / "a") == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_on_one_of_two_hosts(run_on_ranks, tmp_path):
    (_, before), *_ = run_on_ranks(save, 4, hosts_of(tmp_path, "ab"))
    flip(tmp_path / "a/step-3/__0_0.distcp")
    loaded(run_on_ranks(load, 4, hosts_of(tmp_path, "ab")), before)


def test_a_flipped_bit_on_the_only_host(run_on_ranks, tmp_path):
    run_on_ranks(save, 2, hosts_of(tmp_path, "a"))
    broken = tmp_path / "a/step-3/__1_0.distcp"
    flip(broken)
    for step, problems, _ in run_on_ranks(load, 2, hosts_of(tmp_path, "a")):
        assert (step, problems) == (None, [f"{broken} is damaged: its checksum is not the one that was written"])


def test_a_copy_that_fails_leaves_the_one_before(run_on_ranks, tmp_path):
    folders = hosts_of(tmp_path, "ab")
    results = run_on_ranks(save, 2, folders, (3, 6), 6)
    for said, _ in results:
        (text,) = said
        assert text.startswith("no copy in memory of step 6: ")
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["step-3"]
    loaded(run_on_ranks(load, 2, folders), results[0][1])
