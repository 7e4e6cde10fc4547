"""Writes and reads a run's fingerprints, in a file ``fingerprints-<step>.bin`` for each start of the run.

The files lie next to the run's dataset. The first line of each is a `Header` as JSON. After it come rows of
little-endian float64 numbers: the step, then (ranks, entries, columns). If a kill has cut off the last row, it is left
out.
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

# What fingerprints are taken of, as `Header.entries` names it.
LOSS = "loss"
INPUTS = "the batch's inputs"
TARGETS = "the batch's targets"
# Before a block's name. These entries only have sums of squares, and sums of squares times a constant.
OUTPUT = "output of "
# Before a parameter's name.
GRADIENT = "gradient of "
WEIGHT = "weight "

# Stands in the place of the square of a norm that was not computed.
NOT_TAKEN = -1.0


@dataclass(frozen=True)
class Header:
    """Describes the rows of a file.

    Attributes:
        entries: what each fingerprint is taken of, in the order of a step: batch, loss, gradients from the last layer
            to the first, weights after the step.
        columns: number of values of a fingerprint.
        layout: the run's layout, as text.
        dtype: data types of the weights and of the forward pass, as text.
        ranks: number of ranks of the run.
        replicas: (entries,), how many ranks hold the same shard; 1 if the run only keeps the sum over the ranks.
        shards: (ranks, entries), equal numbers for ranks that hold the same shard, -1 for a rank that holds none; None
            if the run only keeps the sum over the ranks.
        version: version of the file's format.
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
    """The fingerprints of one step.

    Attributes:
        header: describes the entries.
        local: (ranks, entries, columns), float64; one rank if the run only keeps the sum over the ranks.
    """

    header: Header
    local: NDArray[np.float64]

    def full(self) -> NDArray[np.float64]:
        """Return the fingerprints of the full tensors, (entries, columns)."""
        # Replicas of a shard count several times in the sum.
        replicas = np.asarray(self.header.replicas)[:, None]
        return self.local.sum(axis=0) / replicas


class FingerprintFile:
    """A file of fingerprints that rank 0 writes.

    Args:
        outdir: the run's folder.
        first: the step at which the run was started.
        header: describes the rows.

    Raises:
        RecordError: the file cannot be written.
    """

    def __init__(self, outdir: Path, first: int, header: Header) -> None:
        self.path = outdir / f"fingerprints-{first}.bin"
        try:
            self._file: IO[bytes] = open(self.path, "wb")  # noqa: SIM115
            self._file.write(json.dumps(asdict(header)).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def append(self, step: int, local: NDArray[np.float64]) -> None:
        """Write the fingerprints of a step, (ranks, entries, columns). Raises RecordError if that fails."""
        row = np.concatenate(([step], local.ravel())).astype("<f8")
        try:
            self._file.write(row.tobytes())
            # Either all of the row reaches the system now, or an error is raised here.
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None


def read_fingerprints(outdir: Path) -> dict[int, Fingerprints]:
    """Read the fingerprints of a run: step → fingerprints. Step -1 has the weights that the run began with.

    If a step was made several times, the last one counts.

    Raises:
        RecordError: there are no fingerprints, or a file is damaged.
    """
    # First step → file.
    paths: dict[int, Path] = {}
    for path in outdir.glob("fingerprints-*.bin"):
        first = path.stem.removeprefix("fingerprints-")
        if first.isdecimal():
            paths[int(first)] = path
    if not paths:
        raise RecordError(f"{outdir} has no fingerprints: train with --fingerprints 1")
    steps: dict[int, Fingerprints] = {}
    for first_step in sorted(paths):
        before = {}
        for step, fingerprints in steps.items():
            if step < first_step:
                before[step] = fingerprints
        # Of the step before, both files have a row: the earlier process's has more.
        steps = _read(paths[first_step], first_step) | before
    return dict(sorted(steps.items()))


def _read(path: Path, first: int) -> dict[int, Fingerprints]:
    """Read one file: step → fingerprints.

    Args:
        path: the file.
        first: the step at which the run was started.
    """
    try:
        with open_file(path) as file:
            line, _, content = file.read().partition(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    header = _header(path, line)
    kept_ranks = 1 if header.shards is None else header.ranks
    shape = (kept_ranks, len(header.entries), header.columns)
    # The step, and the fingerprints: 8 bytes each.
    row_bytes = 8 * (1 + int(np.prod(shape)))
    complete_rows = len(content) // row_bytes
    values = np.frombuffer(content[: complete_rows * row_bytes], "<f8")
    rows = values.reshape(complete_rows, row_bytes // 8)
    fingerprints = {}
    for row in rows:
        if row[0] >= first - 1:
            local = row[1:].reshape(shape)
            fingerprints[int(row[0])] = Fingerprints(header, local)
    return fingerprints


def _header(path: Path, line: bytes) -> Header:
    try:
        fields = parse_json(line)
        version = fields["version"]
        if version != VERSION:
            raise RecordError(f"{path} is of version {version}, and this mmm reads {VERSION}")
        header = Header(**fields)
        n_entries = len(header.entries)
        fits = np.shape(header.replicas) == (n_entries,) and header.columns >= 2
        if header.shards is not None:
            fits = fits and np.shape(header.shards) == (header.ranks, n_entries)
        if not fits:
            raise ValueError("its header does not fit its entries")
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a file of fingerprints: {error}") from None
    return header
