"""Writes and reads a run's fingerprints, in a file ``fingerprints-<step>.bin`` for each start of the run.

The files lie next to the run's dataset. The first line of each is a `Header` as JSON. After it come rows of
little-endian float64 numbers: the step, then (ranks, entries, columns): the sums, then the digits of the hash of the
bits. If a kill has cut off the last row, it is left out.
"""

from __future__ import annotations

import json
import math
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
        over_ranks = self.local.sum(axis=0)
        # Replicas of a shard count several times in the sum. (entries,) becomes (entries, 1).
        replicas = np.asarray(self.header.replicas)
        return over_ranks / replicas[:, None]

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
            # A rank that holds nothing of the tensor.
            if shard < 0:
                continue
            bits = int(hashes[index])
            if of_shard.setdefault(shard, bits) != bits:
                return None
        modulus = 1 << HASH_BITS * HASH_COLUMNS
        return sum(of_shard.values()) % modulus


class FingerprintFile:
    """A file of fingerprints that rank 0 writes.

    Args:
        outdir: the run's folder.
        first: the step at which the run was started.
        header: describes the rows.

    Raises:
        RecordError: the file cannot be written.
    """

    def __init__(
        self,
        outdir: Path,
        first: int,
        header: Header,
    ) -> None:
        self.path = outdir / f"fingerprints-{first}.bin"
        line = json.dumps(asdict(header)) + "\n"
        try:
            self._file: IO[bytes] = open(self.path, "wb")  # noqa: SIM115
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def append(self, step: int, local: NDArray[np.float64]) -> None:
        """Write the fingerprints of a step, (ranks, entries, columns). Raises RecordError if that fails."""
        row = np.concatenate(([step], local.ravel()))
        row = row.astype("<f8")
        try:
            self._file.write(row.tobytes())
            # Either all of the row reaches the system now, or an error is raised here.
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None


def has_fingerprints(outdir: Path) -> bool:
    """Say whether a run's folder has files of fingerprints."""
    return any(outdir.glob("fingerprints-*.bin"))


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
        # Steps from here on are made again.
        before = {}
        for step, fingerprints in steps.items():
            if step < first_step:
                before[step] = fingerprints
        restarted = _read(paths[first_step], first_step)
        # Both have a row for the step before: that of the earlier process has more than the weights.
        steps = restarted | before
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
    kept_ranks = header.ranks
    if header.shards is None:
        # Only the sum over the ranks.
        kept_ranks = 1
    n_columns = header.columns
    if header.version > 1:
        n_columns += HASH_COLUMNS
    shape = (kept_ranks, len(header.entries), n_columns)
    # The step, and the fingerprints: 8 bytes each.
    row_numbers = 1 + math.prod(shape)
    row_bytes = 8 * row_numbers
    complete_rows = len(content) // row_bytes
    complete = content[: complete_rows * row_bytes]
    # (rows, row_numbers)
    rows = np.frombuffer(complete, "<f8").reshape(complete_rows, row_numbers)
    fingerprints = {}
    for row in rows:
        # Written so that NaN, of a damaged row, is left out.
        if not row[0] >= first - 1:
            continue
        # (ranks, entries, columns)
        values = row[1:].reshape(shape)
        sums, digits = np.split(values, [header.columns], axis=-1)
        hashes = None
        if header.version > 1:
            hashes = _hashes(digits)
        step = int(row[0])
        fingerprints[step] = Fingerprints(header, sums, hashes)
    return fingerprints


def _hashes(digits: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Put the hashes together from their digits, (…, digits): the lowest comes first."""
    # (digits,): 0, 21, 42
    shifts = HASH_BITS * np.arange(HASH_COLUMNS, dtype=np.uint64)
    shifted = digits.astype(np.uint64) << shifts
    hashes: NDArray[np.uint64] = shifted.sum(axis=-1, dtype=np.uint64)
    return hashes


def _header(path: Path, line: bytes) -> Header:
    """Read the first line of a file. Raises RecordError: it is not a header, or of a later version."""
    try:
        fields = parse_json(line)
        version = fields["version"]
        if version not in (1, VERSION):
            raise RecordError(f"{path} is of version {version}, and this mmm reads up to {VERSION}")
        header = Header(**fields)
        n_entries = len(header.entries)
        fits = header.columns >= 2
        fits &= np.shape(header.replicas) == (n_entries,)
        if header.shards is not None:
            fits &= np.shape(header.shards) == (header.ranks, n_entries)
        elif version > 1:
            # A sum of hashes over the ranks counts each replica, and says nothing.
            fits = False
        if not fits:
            raise ValueError("its header does not fit its entries")
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a file of fingerprints: {error}") from None
    return header
