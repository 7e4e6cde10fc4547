"""Workers whose batches cannot go the usual way: they take the slower one, or the run ends with a message."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmm.data import workers


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


def test_what_cannot_be_pickled_is_an_error_and_no_hang():
    loader = DataLoader(Rows(), 2, num_workers=1, collate_fn=lambda samples: lambda: samples)
    with pytest.raises(Exception, match="pickle"):
        next(workers.read(loader, 20.0, print))
