"""Writes and reads a run's fingerprints, in a file ``fingerprints-<step>.bin`` for each start of the run.

The files lie next to the run's dataset. The first line of each is a `Header` as JSON. After it come rows of
little-endian float64 numbers: the step, then (ranks, entries, columns): the sums, then the digits of the hash of the
bits. If a kill has cut off the last row, it is left out.
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

# Version 1 has no hashes.
VERSION = 2
# A hash of 63 bits has three digits of 21 bits.
HASH_BITS = 21
HASH_COLUMNS = 3

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
        columns: number of sums of a fingerprint.
        layout: the run's layout, as text.
        dtype: data types of the weights and of the forward pass, as text.
        ranks: number of ranks of the run.
        replicas: (entries,), how many ranks hold the same shard; 1 if the run only keeps the sum over the ranks.
        shards: (ranks, entries), equal numbers for ranks that hold the same shard, -1 for a rank that holds none; None
            if the run only keeps the sum over the ranks.
        exact: the canonical partition of a run whose bits do not depend on its layout; empty for any other run.
        version: version of the file's format.
    """

    entries: list[str]
    columns: int
    layout: str
    dtype: str
    ranks: int
    replicas: list[float]
    shards: list[list[int]] | None
    exact: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of one step.

    Attributes:
        header: describes the entries.
        local: (ranks, entries, columns), float64; one rank if the run only keeps the sum over the ranks.
        hashes: (ranks, entries), uint64: the hash of each rank's bits. None in a record of version 1.
    """

    header: Header
    local: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None = None

    def full(self) -> NDArray[np.float64]:
        """Return the fingerprints of the full tensors, (entries, columns)."""
        # Replicas of a shard count several times in the sum.
        replicas = np.asarray(self.header.replicas)[:, None]
        return self.local.sum(axis=0) / replicas

    def full_hash(self, index: int) -> int | None:
        """Return the hash of one full tensor: an integer of 63 bits. None if ranks with the same shard have other bits.

        Args:
            index: index of its entry.
        """
        assert self.hashes is not None
        assert self.header.shards is not None
        # Shard → its hash.
        of_shard: dict[int, int] = {}
        for shards, hashes in zip(self.header.shards, self.hashes, strict=True):
            shard = shards[index]
            if shard >= 0 and of_shard.setdefault(shard, int(hashes[index])) != hashes[index]:
                return None
        return sum(of_shard.values()) % (1 << HASH_BITS * HASH_COLUMNS)


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
    hash_columns = 0 if header.version == 1 else HASH_COLUMNS
    shape = (kept_ranks, len(header.entries), header.columns + hash_columns)
    # The step, and the fingerprints: 8 bytes each.
    row_bytes = 8 * (1 + int(np.prod(shape)))
    complete_rows = len(content) // row_bytes
    values = np.frombuffer(content[: complete_rows * row_bytes], "<f8")
    rows = values.reshape(complete_rows, row_bytes // 8)
    fingerprints = {}
    for row in rows:
        if row[0] >= first - 1:
            sums, digits = np.split(row[1:].reshape(shape), [header.columns], axis=-1)
            hashes = _hashes(digits) if hash_columns else None
            fingerprints[int(row[0])] = Fingerprints(header, sums, hashes)
    return fingerprints


def _hashes(digits: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Put the hashes together from their digits, (…, digits): the lowest comes first."""
    shifts = np.arange(digits.shape[-1], dtype=np.uint64) * np.uint64(HASH_BITS)
    hashes: NDArray[np.uint64] = (digits.astype(np.uint64) << shifts).sum(axis=-1, dtype=np.uint64)
    return hashes


def _header(path: Path, line: bytes) -> Header:
    try:
        fields = parse_json(line)
        version = fields["version"]
        if version not in (1, VERSION):
            raise RecordError(f"{path} is of version {version}, and this mmm reads up to {VERSION}")
        header = Header(**fields)
        n_entries = len(header.entries)
        fits = np.shape(header.replicas) == (n_entries,) and header.columns >= 2
        # Replicas of a hash cannot be told from one another in a sum over the ranks.
        fits = fits and (version == 1 or header.shards is not None)
        if header.shards is not None:
            fits = fits and np.shape(header.shards) == (header.ranks, n_entries)
        if not fits:
            raise ValueError("its header does not fit its entries")
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a file of fingerprints: {error}") from None
    return header
