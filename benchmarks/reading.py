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


def measure(path: Path, args: argparse.Namespace, cold: bool) -> tuple[float, float]:
    """Seconds and CPU-seconds of a batch, medians."""
    walls = []
    cpus = []
    # The first three are warm-up.
    for step in range(-3, args.steps):
        if cold:
            forget(path)
        corpus = open_tokens(path, args.token_dtype)
        assert corpus is not None
        assert isinstance(corpus.train, TokenFile)
        tokens = FileTokens(corpus.train, args.seq_length, seed=0, vocab_size=VOCABULARY)
        wall_began = time.perf_counter()
        cpu_began = time.process_time()
        tokens.batch(step % tokens.steps_per_epoch(args.batch), args.batch, 0, args.batch)
        if step >= 0:
            walls.append(time.perf_counter() - wall_began)
            cpus.append(time.process_time() - cpu_began)
    return median(walls), median(cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--token_dtype", default="uint16")
    parser.add_argument("--tokens", type=float, default=5e8)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "tokens.bin"
        if args.file is None:
            generator = np.random.default_rng(0)
            generator.integers(0, VOCABULARY, size=int(args.tokens), dtype=np.uint16).tofile(path)
            with open(path, "rb") as file:
                # Pages that are not written yet cannot be forgotten.
                os.fsync(file.fileno())
        megabytes = path.stat().st_size / 1e6
        print(f"a step of {args.batch} × {args.seq_length} tokens, of {megabytes:,.0f} MB")
        for name, cold in (("memory", False), ("disk", True)):
            wall, cpu = measure(path, args, cold)
            print(f"{name:<8} {1e6 * wall:10,.0f} µs {1e6 * cpu:10,.0f} CPU-µs")


if __name__ == "__main__":
    main()
