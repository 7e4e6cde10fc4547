"""What a rank's batch of tokens costs to read: from a file that the host's memory holds, and from the disk.

    python benchmarks/reading.py [--file tokens.bin] [--tokens 5e8] [--seq_length 2048] [--batch 8] [--steps 200]

A rank maps the file, and reads the pages of its own samples (`mmm.data.text.documents`). Before each step of "disk"
the kernel is asked to forget the file's pages (posix_fadvise), which it does for those that nobody has mapped. Without
--file one of random uint16 tokens is made, and removed. Printed are medians a step: seconds, and CPU-seconds, which
others on the machine change less.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from mmm.data.text.documents import FileTokens
from mmm.data.text.token_file import TokenFile, open_tokens

VOCABULARY = 50_257


def forget(path: Path) -> None:
    """Have the next read of the file go to the disk, as far as the kernel does what it is asked."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, given: argparse.Namespace, cold: bool) -> tuple[float, float]:
    """Seconds and CPU-seconds of a batch, medians."""
    walls, cpus = [], []
    for step in range(-3, given.steps):  # the first are not counted
        if cold:
            forget(path)
        corpus = open_tokens(path, given.token_dtype)
        assert corpus is not None
        assert isinstance(corpus.train, TokenFile)
        tokens = FileTokens(corpus.train, given.seq_length, seed=0, vocab_size=VOCABULARY)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens.batch(step % tokens.steps_per_epoch(given.batch), given.batch, 0, given.batch)
        if step >= 0:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return median(walls), median(cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--token_dtype", default="uint16")
    parser.add_argument("--tokens", type=float, default=5e8)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.file or Path(folder) / "tokens.bin"
        if given.file is None:
            generator = np.random.default_rng(0)
            generator.integers(0, VOCABULARY, size=int(given.tokens), dtype=np.uint16).tofile(path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # pages that are not written yet cannot be forgotten
        print(f"a step of {given.batch} × {given.seq_length} tokens, of {path.stat().st_size / 1e6:,.0f} MB")
        for name, cold in (("memory", False), ("disk", True)):
            wall, cpu = measure(path, given, cold)
            print(f"{name:<8} {1e6 * wall:10,.0f} µs {1e6 * cpu:10,.0f} CPU-µs")


if __name__ == "__main__":
    main()
