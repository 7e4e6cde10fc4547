"""A module as a user has it, for ``--model my_module:make``."""

from torch import nn


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 10))


def broken() -> nn.Module:
    raise KeyError("no such size")


def number() -> int:
    return 3
