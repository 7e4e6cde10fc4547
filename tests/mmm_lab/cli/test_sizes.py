"""Sizes of memory on a command line."""

import pytest

from mmm.errors import ConfigError
from mmm_lab.cli.sizes import parse_bytes, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("80 GB", 80e9), ("1.5TiB", 1.5 * 2**40), ("40gib", 40 * 2**30), ("68719476736", 2**36)],
)
def test_units(text, size):
    assert parse_bytes(text, "--gpu_memory") == size


@pytest.mark.parametrize("text", ["9" * 5000 + "h", "9" * 5000 + ":00", "6", "6h6", "h", "-1h", "1e3h"])
def test_wrong_times(text):
    with pytest.raises(ConfigError, match="-t "):
        parse_time(text, "-t")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0GiB", "64Gb1", "64 parsecs", "64", "1e999GiB", "nan", "1..2GiB"]
)
def test_wrong_units(text):
    with pytest.raises(ConfigError, match="--gpu_memory"):
        parse_bytes(text, "--gpu_memory")
