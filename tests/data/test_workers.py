"""Workers whose batches cannot go the usual way: they take the slower one, or the run ends with a message."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import util
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmm.data import workers
from mmm.data.images.batches import ImageBatches
from mmm.data.images.fake import FakeImages
from mmm.errors import DataError
from support.launcher import Launcher

LONG = "pbs.1234567.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov/00000000-0000-4000-8000-000000000000/tmp/of/a/job"
TOO_SMALL = "/dev/shm has 67 MB, too little room: give it more (docker run --shm-size), or use no workers"
THROUGH_PIPES = "data loader workers hand over batches through pipes, which takes longer: "


class Rows(Dataset):
    """Row i is (i, i²). `fail` is called in the worker before each."""

    def __init__(self, fail=lambda: None):
        self.fail = fail

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.fail()
        return {"row": (torch.tensor([index, index**2]), str(index))}


def stacked(samples):
    return {"row": (torch.stack([s["row"][0] for s in samples]), [s["row"][1] for s in samples])}


def rows(loader, notes):
    batches = list(workers.read(loader, 60.0, notes.append))
    assert [name for batch in batches for name in batch["row"][1]] == list("012345")
    return torch.cat([batch["row"][0] for batch in batches]).tolist()


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    folder = tmp_path / LONG
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # where sockets are
    return folder


def test_a_full_shared_memory_sends_batches_through_pipes(monkeypatch):
    free = SimpleNamespace(f_bavail=0, f_blocks=16384, f_frsize=4096)
    monkeypatch.setattr(workers.os, "statvfs", lambda path: free)
    notes = []
    assert rows(DataLoader(Rows(), 2, num_workers=2, collate_fn=stacked), notes) == [[i, i * i] for i in range(6)]
    assert set(notes) == {THROUGH_PIPES + TOO_SMALL}


def test_a_collate_that_finds_shared_memory_full_ends_the_run():
    def collate(samples):  # as PyTorch's own
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    with pytest.raises(DataError, match=r"/dev/shm"):
        next(workers.read(DataLoader(Rows(), 2, num_workers=1, collate_fn=collate), 20.0, print))


def test_a_temporary_folder_too_long_for_sockets_sends_batches_through_pipes(long_tmpdir, monkeypatch):
    monkeypatch.setattr(workers, "SHORT_FOLDERS", ())  # there is no other
    batches, notes = ImageBatches(FakeImages(24, (3, 8, 8), 4, seed=5), 4), []
    expected = list(batches.loader(workers=0).epoch())
    for batch, other in zip(batches.loader(workers=1, note=notes.append).epoch(), expected, strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)
    assert notes[0].startswith(THROUGH_PIPES + "sockets cannot be made")


def test_sockets_get_a_short_folder(long_tmpdir):
    notes = []
    assert rows(DataLoader(Rows(), 2, num_workers=1), notes)[5] == [5, 25]
    assert len(notes) == 1
    assert f"TMPDIR has {len(str(long_tmpdir))} bytes" in notes[0]
    assert util.get_temp_dir().startswith("/tmp/")
    assert tempfile.gettempdir() == str(long_tmpdir)  # the rest stays where it was asked for


def test_a_short_temporary_folder_stays(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert workers.use_short_socket_folder() is None


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
