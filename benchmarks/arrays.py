"""What a batch costs to read from an HDF5 file: by `mmm.data.arrays`, and by a plain loop of h5py.

    python benchmarks/arrays.py [--megabytes 2000] [--batch 32] [--steps 15] [--folder /tmp]

For each way to store the samples, a file is made, read, and removed. A sample is (4, 128, 128) float32, 262 kB. The
plain loop is ``torch.from_numpy(np.stack([dataset[i] for i in indices]))``, with the same indices. The two take turns,
three times, and each opens the file anew. Printed are medians: MB of samples a second, and CPU-seconds for each GB,
which others on the machine change less. Read from the file are MB for each MB of samples, by Linux's count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import torch

from mmm.data.arrays import ArrayBatches, Arrays
from mmm.data.local_batches import local_batches

# A sample, float32.
SHAPE = (4, 128, 128)
SAMPLE_BYTES = 4 * 4 * 128 * 128
# Samples in a chunk of the file, which HDF5 reads as a whole.
CHUNK = 16
ROUNDS = 3
# Name → what h5py's `create_dataset` is given.
STORED: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "one sample per chunk": {"chunks": (1, *SHAPE)},
    f"chunks of {CHUNK}": {"chunks": (CHUNK, *SHAPE)},
    f"chunks of {CHUNK}, gzip": {"chunks": (CHUNK, *SHAPE), "compression": "gzip", "compression_opts": 1},
}


def write(path: Path, samples: int, storage: dict[str, Any]) -> None:
    """Write random numbers of 8 bits as float32, so that gzip has something to do."""
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (samples, *SHAPE), "f4", **storage)
        for begin in range(0, samples, CHUNK):
            end = min(begin + CHUNK, samples)
            values = generator.integers(0, 256, (end - begin, *SHAPE))
            dataset[begin:end] = values.astype(np.float32)


def plain(path: Path, batches: Iterator[list[int]]) -> Iterator[torch.Tensor]:
    """A loop as one writes it with h5py."""
    with h5py.File(path) as file:
        dataset = file["x"]
        for indices in batches:
            samples = [dataset[i] for i in indices]
            yield torch.from_numpy(np.stack(samples))


def read_bytes() -> int:
    """Bytes that this process has read from files, also from those that the host's memory holds."""
    # Its first line is "rchar: BYTES".
    counts = Path("/proc/self/io").read_text().split()
    return int(counts[1])


def measure(reader: Iterator[Any], steps: int) -> tuple[float, float, float]:
    """Seconds, CPU-seconds and bytes read of some steps."""

    def counters() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), float(read_bytes())

    # The first batch opens the file.
    next(reader)
    begin = counters()
    for _ in islice(reader, steps):
        pass
    seconds, cpu, read = (end - first for end, first in zip(counters(), begin, strict=True))
    return seconds, cpu, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--folder", type=Path)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    samples = int(flags.megabytes * 1e6 / SAMPLE_BYTES)
    megabytes = flags.steps * flags.batch * SAMPLE_BYTES / 1e6
    print(f"{samples:,} samples of {SAMPLE_BYTES / 1e3:.0f} kB, {flags.steps} batches of {flags.batch}")
    print(f"{'stored':<22}{'read by':<20}{'MB/s':>7}{'CPU-s/GB':>10}{'of a loop':>11}{'MB read/MB':>12}")
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        path = Path(folder) / "samples.h5"
        for stored, storage in STORED.items():
            write(path, samples, storage)
            arrays = Arrays(path, ["x"])

            def in_blocks(block: int, arrays: Arrays = arrays) -> Iterator[Any]:
                batches = ArrayBatches(arrays, flags.batch, 0, flags.batch, seed=0, block=block)
                # Each reads the file through a handle of its own.
                arrays._opened = None
                return iter(batches.from_step(0))

            readers: dict[str, Callable[[], Iterator[Any]]] = {
                "a loop of h5py": lambda: plain(path, local_batches(samples, flags.batch, 0, flags.batch, seed=0)),
                "Arrays": lambda read=in_blocks: read(1),
            }
            if arrays.chunk > 1:
                readers[f"Arrays, block={CHUNK}"] = lambda read=in_blocks: read(CHUNK)
            results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in readers}
            for _ in range(ROUNDS):
                for name, reader in readers.items():
                    results[name].append(measure(reader(), flags.steps))
                    arrays._opened = None
            # The loop of h5py is the first, and the others are compared with it.
            loop_cpu = 0.0
            for name, rounds in results.items():
                wall, cpu, read = (median(column) for column in zip(*rounds, strict=True))
                loop_cpu = loop_cpu or cpu
                print(
                    f"{stored:<22}{name:<20}{megabytes / wall:7,.0f}{1000 * cpu / megabytes:10.2f}"
                    f"{cpu / loop_cpu:11.2f}{read / 1e6 / megabytes:12.2f}",
                    flush=True,
                )
            path.unlink()


if __name__ == "__main__":
    main()
