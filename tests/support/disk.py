"""A disk of its own: small, or read-only."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

# Small and read-only disks are mounted as root.
CAN_MOUNT = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")


@contextmanager
def small_disk(folder, options):
    """A file system of its own at `folder`, for the length of a ``with`` block."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def make_read_only(folder):
    """A file system of `small_disk`, from now on."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
