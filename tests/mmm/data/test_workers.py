"""Workers from which no batch comes end the run with a message."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmm.data import workers
from mmm.errors import DataError


class Rows(Dataset):
    """Row i is (i, i²). `fail` is called in the worker before each."""

    def __init__(self, fail=lambda: None):
        self.fail = fail

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.fail()
        return {"row": (torch.tensor([index, index**2]), str(index))}


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
    with pytest.raises(DataError, match=f"^the data cannot be read ahead: {message}.*; try it without workers"):
        next(workers.read(DataLoader(Rows(fail), 2, num_workers=1), timeout))
    assert before in (signal.SIG_DFL, signal.getsignal(signal.SIGCHLD))  # PyTorch's own, once there is one
