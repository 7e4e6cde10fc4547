"""Workers whose batches cannot go the usual way: they take the slower one, or the run ends with a message."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmm.data import workers
from mmm.errors import DataError
from support.launcher import Launcher

LONG = "pbs.1234567.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov/00000000-0000-4000-8000-000000000000/tmp/of/a/job"


class Rows(Dataset):
    """Row i is (i, i²). `fail` is called in the worker before each."""

    def __init__(self, fail=lambda: None):
        self.fail = fail

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.fail()
        return {"row": (torch.tensor([index, index**2]), str(index))}


def rows(loader, notes):
    batches = list(workers.read(loader, 60.0, notes.append))
    assert [name for batch in batches for name in batch["row"][1]] == list("012345")
    return torch.cat([batch["row"][0] for batch in batches]).tolist()


def test_a_collate_that_finds_shared_memory_full_ends_the_run():
    def collate(samples):  # as PyTorch's own
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    with pytest.raises(DataError, match=r"/dev/shm"):
        next(workers.read(DataLoader(Rows(), 2, num_workers=1, collate_fn=collate), 20.0, print))


@pytest.mark.parametrize(
    ("fail", "timeout", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 20.0, "DataLoader worker"),
        (lambda: time.sleep(2), 0.5, "DataLoader timed out after 0.5 seconds"),
    ],
    ids=["killed", "stuck"],
)
def test_a_worker_that_does_not_come_back_is_said(fail, timeout, message):
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(DataError, match=f"^the data cannot be read ahead: {message}.*; try it without workers$"):
        next(workers.read(DataLoader(Rows(fail), 2, num_workers=1), timeout, print))
    assert before in (signal.SIG_DFL, signal.getsignal(signal.SIGCHLD))  # PyTorch's own, once there is one


def test_what_cannot_be_pickled_is_an_error_and_no_hang():
    loader = DataLoader(Rows(), 2, num_workers=1, collate_fn=lambda samples: lambda: samples)
    with pytest.raises(Exception, match="pickle"):
        next(workers.read(loader, 20.0, print))


@pytest.mark.long
def test_image_folders_under_docker_and_under_a_long_temporary_folder(tmp_path):
    from PIL import Image

    from mmm.history import load

    for name, colour in (("a", (250, 0, 0)), ("b", (0, 0, 250))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (20, 24), colour).save(tmp_path / "images" / name / f"{number}.png")
    launcher = Launcher(tmp_path)
    (tmp_path / LONG).mkdir(parents=True)
    words = "-m mmm.launch -n 2 --device cpu python3 -m mmm.trainer.vit --dataset folder --data_dir images --workers 2"
    sizes = "--image_size 224 --patch_size 32 --preset debug --global_batch_size 16 --max_iters 3 --outdir"
    losses, notes = {}, {}
    for name, before, variables in (
        ("plain", "", {}),
        ("long", "", {"TMPDIR": str(tmp_path / LONG)}),
        ("small", "mount -t tmpfs -o size=4m tmpfs /dev/shm && ", {}),
    ):
        line = f"{before}exec {sys.executable} {words} {sizes} {name}"
        command = ["unshare", "-m", "sh", "-c", line] if before else ["sh", "-c", line]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=launcher.environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if before and "unshare failed" in done.stderr:  # not allowed here
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        record = load(tmp_path / name)
        losses[name], notes[name] = record["loss"].values.tolist(), record.attrs["config"]
    assert all(values == losses["plain"] for values in losses.values())
    assert "unix sockets are in /tmp/pymp-" in notes["long"]
    assert "through pipes" not in notes["plain"] + notes["long"]
    assert "small" not in notes or "/dev/shm has 4 MB, too little room" in notes["small"]
