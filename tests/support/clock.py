"""Bounds of time that hold on a busy machine too."""

import os
import resource
from pathlib import Path

import pytest

# Seconds until a process counts as hanging: no test that passes waits for it.
PATIENCE = 600.0


def stretched(seconds):
    """A bound for what takes less than `seconds` on a quiet machine: as many times more as there are processes a core
    that want to run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    now = Path("/proc/loadavg")
    running = int(now.read_text().split()[3].partition("/")[0]) if now.exists() else 0
    return seconds * max(1.0, running / cores, os.getloadavg()[0] / cores)


def long(*values, **named):
    """A row of a table that `make test-long` alone runs."""
    return pytest.param(*values, marks=pytest.mark.long, **named)


def children_cpu():
    """CPU seconds of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
