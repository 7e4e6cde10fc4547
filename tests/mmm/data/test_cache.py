"""Downloads: once a host, whole or not at all; without a network real digits stand in, and it is said."""

import functools
import http.server
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from mmm.data import cache
from mmm.data.cache import Refused, cache_folder, download_once
from mmm.data.images import published
from mmm.data.images.datasets import load_images
from mmm.data.images.published import SERVERS
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError
from support.clock import PATIENCE
from support.published import publish_mnist

FORK = multiprocessing.get_context("fork")


def slow_download(partial):
    """Leaves a line in the folder above, so that downloads can be counted."""
    with open(partial.parent / "asked", "a") as asked:
        asked.write("once\n")
    (partial / "half").write_text("first")
    time.sleep(0.3)
    (partial / "whole").write_text("second")


def race(folder, download, processes):
    """What each of several processes found."""

    ready = FORK.Barrier(processes)

    def obtain(queue):
        ready.wait()
        try:
            download_once(folder, download)
            queue.put(sorted(path.name for path in folder.iterdir()))
        except Refused as refused:
            queue.put(str(refused))

    queue = FORK.Queue()
    racers = [FORK.Process(target=obtain, args=(queue,)) for _ in range(processes)]
    for racer in racers:
        racer.start()
    result = [queue.get(timeout=PATIENCE) for _ in racers]
    for racer in racers:
        racer.join()
    return result


def asked(folder):
    return (folder.parent / "asked").read_text().count("once")


def test_processes_that_race_download_once(tmp_path):
    folder = tmp_path / "data"
    assert race(folder, slow_download, 5) == [["half", "whole"]] * 5
    assert asked(folder) == 1


def test_without_locks_all_still_read_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "lock", lambda descriptor: cache.Lock.NONE)
    # As on several hosts.
    monkeypatch.setattr(cache.socket, "gethostname", lambda: str(os.getpid()))
    assert race(tmp_path / "data", slow_download, 3) == [["half", "whole"]] * 3


def test_a_download_that_was_killed_leaves_nothing_to_read(tmp_path):
    folder = tmp_path / "data"
    racer = FORK.Process(
        target=download_once, args=(folder, lambda partial: (partial / "half").touch() or time.sleep(99))
    )
    racer.start()
    while not list(tmp_path.glob(".data.part.*/half")):
        time.sleep(0.01)
    racer.kill()
    racer.join()
    assert not folder.exists()
    download_once(folder, slow_download)
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "asked", "data"]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
def test_what_somebody_has_planted_in_a_shared_cache(tmp_path, kind):
    place = tmp_path / ".data.lock"
    if kind == "link":
        place.symlink_to(tmp_path / "mine")
    elif kind == "FIFO":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(Refused, match="cannot be written to"):
        download_once(tmp_path / "data", slow_download)
    assert not (tmp_path / "mine").exists()


def test_a_lock_held_for_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(cache, "lock", lambda descriptor: cache.Lock.TAKEN)
    with pytest.raises(DataError, match="still holds"):
        download_once(tmp_path / "data", slow_download)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MMM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mmm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mmm"
    monkeypatch.setenv("MMM_DATA", "~/data")
    assert cache_folder() == Path.home() / "data"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """A folder of a small MNIST, on a server that torchvision is made to point to; the cache is empty."""
    folder = tmp_path / "server"
    resources = publish_mnist(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    dataset = import_torchvision("datasets").MNIST
    monkeypatch.setattr(dataset, "resources", resources)
    address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr(dataset, "mirrors", [address])
    monkeypatch.setitem(SERVERS, "mnist", address)
    monkeypatch.setenv("MMM_DATA", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    server.server_close()


def test_mnist_is_downloaded_once_and_then_read(offered, tmp_path, capsys):
    first = load_images("mnist")
    assert (first.name, first.note, first.source) == ("mnist", "", str(tmp_path / "cache" / "mnist"))
    assert (first.train.samples, first.test.samples) == (20, 7)
    for path in offered.iterdir():
        path.unlink()
    assert load_images("mnist").sha256 == first.sha256
    # No progress bars.
    assert capsys.readouterr() == ("", "")


def test_a_download_with_other_bytes_is_not_taken(offered, tmp_path):
    path = offered / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    data = load_images("mnist")
    assert data.name == "digits"
    assert "corrupted" in data.note
    assert not (tmp_path / "cache" / "mnist").exists()


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mnist", {}, (1, 28, 28)),
        ("mnist", {"image_size": 32, "channels": 3}, (3, 32, 32)),
        ("cifar10", {}, (3, 32, 32)),
    ],
)
def test_real_digits_stand_in_and_it_is_said(monkeypatch, tmp_path, name, options, shape):
    """No torchvision is imported for it, which takes seconds."""
    monkeypatch.setenv("MMM_DATA", str(tmp_path))
    monkeypatch.setitem(SERVERS, name, "http://127.0.0.1:9/")
    monkeypatch.setattr(published, "import_torchvision", None)
    data = load_images(name, **options)
    assert (data.name, data.asked, data.shape, data.train.samples) == ("digits", name, shape, 1437)
    assert f"{name} is not in {tmp_path} and cannot be downloaded" in data.note
    assert "Connection refused" in data.note
    assert "--data_dir" in data.note
    assert data.describe()["note"] == data.note


def test_a_cache_that_is_a_file_stands_in(offered, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    data = load_images("mnist")
    assert data.name == "digits"
    assert "cannot be written to" in data.note
