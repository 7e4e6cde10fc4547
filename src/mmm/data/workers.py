"""A data loader's worker processes: how they hand over their batches, and what is said where one fails.

PyTorch pickles a batch in a thread of the worker. Where that fails (/dev/shm is full, as Docker's with its 64 MB; a
unix socket's path is too long) the thread drops the batch, and the run waits for it forever. So the batch is pickled
before the thread gets it, and goes through the pipe by value where shared memory cannot be had.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mmm.errors import DataError, UserError

SHARED = "/dev/shm"
_FAILED = re.compile(r"DataLoader (worker|timed out)|Pin memory thread exited")  # how PyTorch's messages begin
_reasons: list[str] = []  # why batches that this process received came through the pipe, until `read` has said it
LONGEST_PATH = 103  # bytes of a unix socket's: 107 on Linux (unix(7)), 103 on macOS
BELOW_TMPDIR = len("/pymp-01234567/listener-01234567")
SHORT_FOLDERS = ("/tmp", "/var/tmp")
T = TypeVar("T")


def read(loader: Iterable[T], timeout: float, note: Callable[[str], object]) -> Iterator[T]:
    """The batches of an iterable. If it is a `DataLoader` with workers, no failure of theirs is waited for.

    Args:
        timeout: seconds to wait for a batch, 0 for no end. note: told of each batch that takes the slower way, and of a
            TMPDIR that is too long.

    Raises:
        DataError: a worker has ended, or has not handed over its batch in time.
        UserError: a batch that is one.
    """
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.timeout = loader.timeout or timeout
        if text := use_short_socket_folder():
            note(text)
        if not isinstance(loader.collate_fn, HandOver):
            loader.collate_fn = HandOver(loader.collate_fn)
    try:
        source = iter(loader)
    except OSError as error:
        if isinstance(loader, DataLoader) and loader.num_workers:  # their queues' semaphores are in /dev/shm as well
            raise DataError(f"data loader workers cannot be started: {error}; {_room()}") from None
        raise
    while True:
        try:
            batch = next(source)
        except StopIteration:
            return
        except RuntimeError as error:
            if not _FAILED.match(text := str(error)):
                raise
            raise DataError(f"the data cannot be read ahead: {text.strip()}; try it without workers") from None
        if _reasons:
            note(f"data loader workers hand over batches through pipes, which takes longer: {_reasons.pop()}")
            _reasons.clear()
        if isinstance(batch, UserError):
            try:
                raise batch
            finally:
                del batch  # else the error and this frame keep each other alive, and with them the workers
        yield batch


class HandOver:
    """A ``collate_fn`` of workers whose batches always arrive: pickled here, where what goes wrong is an exception.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._shares = True  # until sockets turn out not to work, of which each attempt would leak a descriptor

    def __call__(self, samples: Any) -> Any:
        if torch.utils.data.get_worker_info() is None:
            return self.collate(samples)
        try:
            batch = self.collate(samples)
        except RuntimeError as error:
            if "shared memory" not in str(error):  # PyTorch's default_collate stacks in it
                raise
            return DataError(f"samples cannot be read ahead: {_room()}")
        reason = _move_to_shared_memory(batch) if self._shares else "sockets cannot be made"
        if reason is None:
            try:
                return _Pickled(bytes(ForkingPickler.dumps(batch)))
            except OSError as error:
                self._shares, reason = False, f"sockets cannot be made ({error})"
        return _Pickled(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL), reason)


class _Pickled:
    """What a worker's queue takes, and what comes out of it as the batch."""

    def __init__(self, data: bytes, reason: str | None = None) -> None:
        self.data, self.reason = data, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.data, self.reason)


def _unpickle(data: bytes, reason: str | None) -> Any:
    if reason is not None:
        _reasons.append(reason)
    return pickle.loads(data)


def _move_to_shared_memory(batch: Any) -> str | None:
    """Move a batch's tensors into shared memory, or say why not. At most half of what is free: others need it, too."""
    finder = _TensorFinder(io.BytesIO())
    finder.dump(batch)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in finder.tensors}
    missing = sum(storage.nbytes() for storage in storages.values() if not storage.is_shared())
    if os.path.isdir(SHARED):
        room = os.statvfs(SHARED)
        if missing > room.f_bavail * room.f_frsize / 2:
            return _room()
    try:
        for tensor in finder.tensors:
            tensor.share_memory_()
    except (OSError, RuntimeError):  # another process was faster
        return _room()
    return None


class _TensorFinder(pickle.Pickler):
    """Finds the tensors in host memory of whatever can be pickled."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            self.tensors.append(thing)
        return int, ()


def _room() -> str:
    """How large shared memory is, and what to do about it."""
    try:
        room = os.statvfs(SHARED)
    except OSError:
        return f"there is no {SHARED}; try it without workers"
    size = room.f_blocks * room.f_frsize / 1e6
    return f"{SHARED} has {size:,.0f} MB, too little room: give it more (docker run --shm-size), or use no workers"


def use_short_socket_folder() -> str | None:
    """Have the sockets of this process and its children made in a folder whose name is short enough.

    They are made two levels below TMPDIR, and a launcher's TMPDIR for a job can leave too little of a path for that.

    Returns:
        What to tell the user; None where TMPDIR is short, or where there is no other folder.
    """
    asked = tempfile.gettempdir()
    folder = next((name for name in SHORT_FOLDERS if os.access(name, os.W_OK | os.X_OK)), None)
    if len(os.fsencode(asked)) + BELOW_TMPDIR <= LONGEST_PATH or folder is None:
        return None
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        made = util.get_temp_dir()  # multiprocessing keeps it, hands it to its children, and removes it at the end
    finally:
        tempfile.tempdir = before
    return f"unix sockets are in {made}: TMPDIR has {len(os.fsencode(asked))} bytes, too long for a socket's path"
