"""Downloads: once a host, whole or not at all, quick to give up; then real digits stand in, and say so."""

import contextlib
import gzip
import hashlib
import http.server
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mmm.data.images.datasets as datasets
from mmm.data import download
from mmm.data.download import File, Refused, cache_folder, obtain
from mmm.data.images import idx
from mmm.data.images.datasets import load_images
from mmm.errors import DataError
from mmm.runtime.ranks import Rank
from support.clock import PATIENCE, stretched

CONTENTS = {"one.bin": bytes(range(256)) * 2000, "two.bin": b"two" * 1000}
FORK = multiprocessing.get_context("fork")


class Server(http.server.ThreadingHTTPServer):
    """Serves `contents`; counts what was asked for; can be slow, or send half."""

    daemon_threads = True

    def __init__(self, contents, pause=0.0, pieces=1, share=1.0):
        self.contents, self.pause, self.pieces, self.share, self.asked = contents, pause, pieces, share, []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def files(self):
        return tuple(
            File(name, hashlib.sha256(content).hexdigest(), len(content), (self.url(name),))
            for name, content in self.contents.items()
        )

    def url(self, name=""):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.server.asked.append(name)
        content = self.server.contents.get(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        sent = content[: int(len(content) * self.server.share)]
        piece = -(-len(sent) // self.server.pieces)
        for begin in range(0, len(sent), piece):
            self.wfile.write(sent[begin : begin + piece])
            self.wfile.flush()
            time.sleep(self.server.pause)

    def handle(self):
        with contextlib.suppress(ConnectionError):  # who asked has heard enough
            super().handle()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*args, **options):
        servers.append(Server(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder):
    return [path.name for path in folder.parent.iterdir() if ".part." in path.name]


def _obtain(folder, files, ranks, queue):
    try:
        obtain(folder, files, ranks)
        queue.put(("read", contents_of(folder)))
    except Refused as refused:
        queue.put(("refused", str(refused)))


def race(folder, files, processes, ranks=None):
    queue = FORK.Queue()
    racers = [FORK.Process(target=_obtain, args=(folder, files, ranks, queue)) for _ in range(processes)]
    for racer in racers:
        racer.start()
    results = [queue.get(timeout=PATIENCE) for _ in racers]
    for racer in racers:
        racer.join()
    return results


def test_processes_that_race_download_once_and_all_read_it(tmp_path, serve):
    server = serve(CONTENTS, pause=0.05, pieces=4)
    assert race(tmp_path / "deep" / "set", server.files(), 5) == [("read", CONTENTS)] * 5
    assert sorted(server.asked) == ["one.bin", "two.bin"]
    assert not leftovers(tmp_path / "deep" / "set")


def test_where_locks_do_not_reach_all_still_read_it_whole(tmp_path, serve, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(download.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    server = serve(CONTENTS, pause=0.02, pieces=4)
    assert race(tmp_path / "set", server.files(), 4) == [("read", CONTENTS)] * 4
    assert len(server.asked) > 2
    assert not leftovers(tmp_path / "set")


def test_a_download_killed_half_way_leaves_nothing_to_read(tmp_path, serve):
    slow = serve(CONTENTS, pause=0.02, pieces=50)
    folder = tmp_path / "set"
    victim = FORK.Process(target=_obtain, args=(folder, slow.files(), None, FORK.Queue()))
    victim.start()
    deadline = time.monotonic() + 10
    while not any(path.stat().st_size for path in tmp_path.glob(".set.part.*/one.bin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert not folder.exists()
    assert leftovers(folder)
    obtain(folder, serve(CONTENTS).files())  # the lock went with its holder, and what was left is swept away
    assert contents_of(folder) == CONTENTS
    assert not leftovers(folder)


@pytest.mark.parametrize(("options", "message"), [({"share": 0.5}, "256000 bytes of sha256"), ({}, "HTTP Error 404")])
def test_half_an_answer_or_none_is_refused(tmp_path, serve, options, message):
    server = serve(CONTENTS, **options)
    files = server.files() if options else (File("gone", "0" * 64, 9, (server.url("gone"),)),)
    with pytest.raises(Refused, match=message):
        obtain(tmp_path / "set", files)
    assert not (tmp_path / "set").exists()
    assert not leftovers(tmp_path / "set")


def test_another_address_is_tried_after_a_wrong_answer(tmp_path, serve):
    wrong, right = serve({"one.bin": bytes(len(CONTENTS["one.bin"]))}), serve(CONTENTS)  # of the same size
    wanted = right.files()[0]
    obtain(
        tmp_path / "set", (File("one.bin", wanted.sha256, wanted.size, (wrong.url("one.bin"), right.url("one.bin"))),)
    )
    assert contents_of(tmp_path / "set") == {"one.bin": CONTENTS["one.bin"]}


def test_an_answer_without_an_end_is_left(tmp_path, serve):
    endless = serve({"one.bin": bytes(10_000_000)}, pause=0.01, pieces=40)
    wanted = serve(CONTENTS).files()[0]
    with pytest.raises(Refused, match="more, not 512000 of"):
        obtain(tmp_path / "set", (replace(wanted, urls=(endless.url("one.bin"),)),))
    assert not leftovers(tmp_path / "set")


@pytest.mark.timeout(20)
def test_what_somebody_has_planted_in_a_shared_cache(tmp_path, serve):
    theirs, server = tmp_path / "theirs", serve({})
    theirs.write_text("theirs")
    os.mkfifo(tmp_path / ".fifo.lock")
    (tmp_path / ".link.lock").symlink_to(tmp_path / "made")
    for name in ("fifo", "link"):
        with pytest.raises(Refused, match="cannot be written to"):
            obtain(tmp_path / name, serve(CONTENTS).files())
    assert not (tmp_path / "made").exists()
    (tmp_path / ".set.refused").symlink_to(theirs)
    with pytest.raises(Refused, match="404"):
        obtain(tmp_path / "set", (File("x", "0" * 64, 9, (server.url("x"),)),))
    assert theirs.read_text() == "theirs"
    note = tmp_path / ".raw.refused"
    note.write_text(json.dumps({"time": time.time() + 1e6, "reason": "no \x1b[2J", "run": "x"}))
    assert download._already_refused(note, None, 0.0) == r"no \x1b[2J"


def test_servers_that_never_answer_share_one_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(Refused) as caught:
            obtain(tmp_path / "set", (File("x", "0" * 64, 9, (url, url, url)), File("y", "0" * 64, 9, (url,))))
    assert str(caught.value) == f"{url}: no answer in 0.3 s"


def test_ranks_of_one_host_share_a_refusal(tmp_path, serve):
    server = serve({})
    files = (File("x", "0" * 64, 9, (server.url("x"),)),)
    results = race(tmp_path / "set", files, 6, Rank(0, 6, 0, 6, "launch"))
    assert results == [("refused", f"{server.url('x')}: HTTP Error 404: Not Found")] * 6
    assert server.asked == ["x"]


def test_a_refusal_does_not_outlive_its_run(tmp_path, serve):
    with pytest.raises(Refused):
        obtain(tmp_path / "set", (File("x", "0" * 64, 9, ("http://127.0.0.1:9/",)),))
    obtain(tmp_path / "set", serve(CONTENTS).files())
    assert contents_of(tmp_path / "set") == CONTENTS
    assert not (tmp_path / ".set.refused").exists()


def test_a_lock_held_for_too_long_is_an_error(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(download, "WAIT_SECONDS", 0.2)
    with (tmp_path / ".set.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"still holds .*\.set\.lock: end it"):
            obtain(tmp_path / "set", ())


def test_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("MMM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mmm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mmm"
    monkeypatch.setenv("MMM_DATA", "~/data")
    assert cache_folder() == Path.home() / "data"


# --- by name --------------------------------------------------------------------------------------------------------


def idx_bytes(array):
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def offered(serve, monkeypatch, tmp_path):
    """A server with a small MNIST that torchvision is made to point to, and an empty cache."""
    arrays = [np.zeros((5, 28, 28)), np.arange(5), np.ones((3, 28, 28)), np.arange(3)]
    contents = {
        f"{name}.gz": gzip.compress(idx_bytes(array.astype(np.uint8)))
        for name, array in zip(idx.FILES, arrays, strict=True)
    }
    server = serve(contents)
    known = tuple((file.sha256, file.size) for file in server.files())
    monkeypatch.setitem(idx.PUBLISHED, "mnist", ((server.url(),), known))
    monkeypatch.setenv("MMM_DATA", str(tmp_path / "cache"))
    return server


def test_mnist_is_downloaded_once_and_then_read(offered, tmp_path):
    first = load_images("mnist")
    assert (first.name, first.note, first.source) == ("mnist", "", str(tmp_path / "cache" / "mnist"))
    assert (first.train.samples, first.test.samples) == (5, 3)
    assert load_images("mnist").sha256 == first.sha256
    assert len(offered.asked) == 4


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mnist", {}, (1, 28, 28)),
        ("mnist", {"image_size": 32, "channels": 3}, (3, 32, 32)),
        ("cifar10", {}, (3, 32, 32)),
    ],
)
def test_real_digits_stand_in_and_it_is_said(monkeypatch, tmp_path, name, options, shape):
    def refuse(*_):
        raise Refused("no network")

    monkeypatch.setenv("MMM_DATA", str(tmp_path))
    monkeypatch.setattr(datasets, "obtain", refuse)
    data = load_images(name, **options)
    assert (data.name, data.asked, data.shape, data.train.samples) == ("digits", name, shape, 1437)
    assert f"{name} is not in {tmp_path} and cannot be downloaded (no network)" in data.note
    assert "digits" in data.note
    assert "--data_dir" in data.note
    assert data.describe()["note"] == data.note


def test_no_network_stands_in_at_once(offered, monkeypatch):
    mirrors = ["http://127.0.0.1:9/", "http://no.invalid/"]
    monkeypatch.setitem(idx.PUBLISHED, "mnist", (tuple(mirrors), idx.PUBLISHED["mnist"][1]))
    began = time.monotonic()
    data = load_images("mnist")
    assert time.monotonic() - began < stretched(download.ANSWER_SECONDS)
    assert data.name == "digits"
    assert "http://127.0.0.1:9/train-images-idx3-ubyte.gz: [Errno 111] Connection refused" in data.note


def test_a_cache_that_is_a_file_stands_in(offered, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    data = load_images("mnist")
    assert data.name == "digits"
    assert "cannot be written to" in data.note
