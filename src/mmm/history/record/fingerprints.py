"""Files of fingerprints, beside a run's dataset: ``fingerprints-<step>.bin``, one for each time that it was started.

The first line is a `Header` as JSON. After it come rows of float64 numbers, little-endian: the step, then (ranks,
entries, columns). What a kill has cut off at the end is no full row, and is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from mmm.errors import RecordError
from mmm.history.record.folder import cannot_write
from mmm.outside import open_file, parse_json

VERSION = 1
LOSS = "loss"
OUTPUT = "output of "  # before a block's name: sums of squares alone, and those times a constant
INPUTS = "the batch's inputs"
TARGETS = "the batch's targets"
GRADIENT, WEIGHT = "gradient of ", "weight "  # before a parameter's name
NOT_TAKEN = -1.0  # in place of the square of a norm


@dataclass(frozen=True)
class Header:
    """What the rows of a file are of.

    Attributes:
        entries: what each fingerprint is of, in the order in which a step makes them: batch, loss, gradients from the
            last layer back, weights after the step.
        columns: numbers of a fingerprint.
        layout: as text. dtype: of the weights, and what forward computes in.
        ranks: of the run.
        replicas: (entries,), how many ranks hold the same shard; or 1 where the run keeps the sum over the ranks alone.
        shards: (ranks, entries): equal numbers where ranks hold the same shard, -1 where they hold none; None where
            the sum is kept alone.
    """

    entries: list[str]
    columns: int
    layout: str
    dtype: str
    ranks: int
    replicas: list[float]
    shards: list[list[int]] | None
    version: int = VERSION


@dataclass(frozen=True)
class Fingerprints:
    """Of one step. local: (kept ranks, entries, columns), float64."""

    header: Header
    local: NDArray[np.float64]

    def full(self) -> NDArray[np.float64]:
        """(entries, columns), of the full tensors."""
        return self.local.sum(axis=0) / np.asarray(self.header.replicas)[:, None]


class FingerprintFile:
    """Open for writing, on rank 0."""

    def __init__(self, outdir: Path, first: int, header: Header) -> None:
        self.path = outdir / f"fingerprints-{first}.bin"
        try:
            self._file: IO[bytes] = open(self.path, "wb")  # noqa: SIM115
            self._file.write(json.dumps(asdict(header)).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def append(self, step: int, local: NDArray[np.float64]) -> None:
        """Raises RecordError."""
        row = np.concatenate(([step], local.ravel())).astype("<f8")
        try:
            self._file.write(row.tobytes())
            self._file.flush()  # all of the row, or an error
        except OSError as error:
            raise cannot_write(self.path, error) from None


def read_fingerprints(outdir: Path) -> dict[int, Fingerprints]:
    """Those of a run by step, -1 for the weights that it began with; of a step that was made again the last.

    Raises:
        RecordError: there are none, or a file is none of these.
    """
    paths = {}  # by the first step
    for path in outdir.glob("fingerprints-*.bin"):
        first = path.stem.removeprefix("fingerprints-")
        if first.isdecimal():
            paths[int(first)] = path
    if not paths:
        raise RecordError(f"{outdir} has no fingerprints: train with --fingerprints 1")
    steps: dict[int, Fingerprints] = {}
    for begin in sorted(paths):
        before = {step: row for step, row in steps.items() if step < begin}
        steps = _read(paths[begin], begin) | before  # of the step before it, the row of the earlier process has more
    return dict(sorted(steps.items()))


def _read(path: Path, first: int) -> dict[int, Fingerprints]:
    try:
        with open_file(path) as file:
            line, _, content = file.read().partition(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    header = _header(path, line)
    shape = (1 if header.shards is None else header.ranks, len(header.entries), header.columns)
    size = 8 * (1 + int(np.prod(shape)))
    rows = np.frombuffer(content[: len(content) // size * size], "<f8").reshape(-1, size // 8)
    return {int(row[0]): Fingerprints(header, row[1:].reshape(shape)) for row in rows if row[0] >= first - 1}


def _header(path: Path, line: bytes) -> Header:
    try:
        fields = parse_json(line)
        version = fields["version"]
        if version != VERSION:
            raise RecordError(f"{path} is of version {version}, and this mmm reads {VERSION}")
        header = Header(**fields)
        entries = len(header.entries)
        fits = np.shape(header.replicas) == (entries,) and header.columns >= 2
        if header.shards is not None:
            fits = fits and np.shape(header.shards) == (header.ranks, entries)
        if not fits:
            raise ValueError("its header does not fit its entries")
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no file of fingerprints: {error}") from None
    return header
