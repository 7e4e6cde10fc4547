"""Reads from a ``DataLoader`` with worker processes without ever waiting for one that has failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from mmm.errors import DataError, UserError

T = TypeVar("T")
# How PyTorch's messages about failed workers begin.
_FAILED = re.compile(r"DataLoader (worker|timed out)|Pin memory thread exited")


def read(loader: Iterable[T], timeout: float) -> Iterator[T]:
    """Yield the batches of an iterable. If it is a `DataLoader` with workers, their failures are reported.

    Args:
        timeout: seconds to wait for a batch; 0 waits forever.

    Raises:
        DataError: a worker has ended or has not handed over its batch in time.
        UserError: a batch is such an error, which a worker returned as a value.
    """
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.timeout = loader.timeout or timeout
    source = iter(loader)
    while True:
        try:
            batch = next(source)
        except StopIteration:
            return
        except RuntimeError as error:
            text = str(error)
            if not _FAILED.match(text):
                raise
            raise DataError(
                f"the data cannot be read ahead: {text.strip()}; try it without workers, or with more room in /dev/shm"
            ) from None
        if isinstance(batch, UserError):
            try:
                raise batch
            finally:
                # Otherwise the error and this frame keep each other alive, and with them the workers.
                del batch
        yield batch


class ErrorsAsValues(Dataset[Any]):
    """A data set that returns a user's error as a value, which `read` raises. A worker would wrap it in its traceback.

    Args:
        get_item: function from an index to an item. It can be pickled, for workers.
    """

    def __init__(self, get_item: Callable[[Any], Any]) -> None:
        self.get_item = get_item

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.get_item(index)
        except UserError as error:
            return error
