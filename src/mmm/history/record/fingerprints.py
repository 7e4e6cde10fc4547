"""The files of a run's fingerprints: what ``--fingerprints`` writes and ``mmm diverge`` reads.

A file is lines of JSON: a header, then one line for each step that was taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmm.errors import RecordError
from mmm.history.record.folder import cannot_write
from mmm.outside import open_file, parse_json

# Entries: what fingerprints are taken of. After the last two comes the name of a parameter.
INPUTS = "the batch's inputs"
TARGETS = "the batch's targets"
LOSS = "loss"
GRADIENT = "gradient of "
WEIGHT = "weight "

# What a rank writes of a tensor that it does not hold: sum, sum of squares, checksum.
NOTHING = (0.0, 0.0, 0)


@dataclass(frozen=True)
class Header:
    """The first line of a file.

    Attributes:
        layout: layout of the run, as text.
        dtype: the run's data type, such as fp32.
        ranks: number of ranks.
        replicas: entry → number of ranks that hold the same shard of it, in the order in which a step computes them.
        exact: the partition of a run whose bits do not depend on its layout; None for any other run.
    """

    layout: str
    dtype: str
    ranks: int
    replicas: Mapping[str, float]
    exact: int | None = None


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of one step.

    Attributes:
        header: describes the run.
        ranks: of each rank, entry → sum, sum of squares and checksum of its shard.
    """

    header: Header
    ranks: Sequence[Mapping[str, Sequence[Any]]]

    def entries(self) -> list[str]:
        """What was taken in this step."""
        taken: set[str] = set()
        for values in self.ranks:
            taken.update(values)
        return [entry for entry in self.header.replicas if entry in taken]

    def local(self, entry: str) -> NDArray[np.float64]:
        """Sum and norm of each rank's shard of an entry, (ranks, 2)."""
        return _with_norm(self._sums(entry))

    def full(self, entry: str) -> NDArray[np.float64]:
        """Sum and norm of a full tensor, (2,)."""
        over_ranks = self._sums(entry).sum(axis=0)
        # Replicas of a shard count several times in the sum.
        full: NDArray[np.float64] = over_ranks / self.header.replicas[entry]
        if entry == LOSS:
            # The squares of its summands depend on how many there are.
            full[1] = full[0] ** 2
        return _with_norm(full)

    def _sums(self, entry: str) -> NDArray[np.float64]:
        """Sum and sum of squares of each rank's shard of an entry, (ranks, 2)."""
        rows = []
        for values in self.ranks:
            total, squares, _ = values.get(entry, NOTHING)
            rows.append([total, squares])
        return np.array(rows, float)

    def checksums(self, entry: str) -> list[int]:
        """The checksum of each rank's shard of an entry."""
        return [int(values.get(entry, NOTHING)[2]) for values in self.ranks]


def _with_norm(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace the sum of squares by the norm, (…, 2)."""
    sums[..., 1] = np.sqrt(sums[..., 1])
    return sums


class FingerprintFile:
    """A file of fingerprints that rank 0 writes.

    Args:
        outdir: the run's folder.
        first: the step at which the run was started.
        header: describes the run.

    Raises:
        RecordError: the file cannot be written.
    """

    def __init__(self, outdir: Path, first: int, header: Header) -> None:
        self.path = outdir / f"fingerprints-{first}.jsonl"
        self._write("w", asdict(header))

    def append(self, step: int, ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Write the fingerprints of a step. Raises RecordError if that fails."""
        self._write("a", {"step": step, "ranks": ranks})

    def _write(self, mode: str, content: Mapping[str, Any]) -> None:
        try:
            with open(self.path, mode) as file:
                file.write(json.dumps(content) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None


def has_fingerprints(outdir: Path) -> bool:
    """Say whether a run's folder has files of fingerprints."""
    return bool(_files(outdir))


def read_fingerprints(outdir: Path) -> dict[int, Fingerprints]:
    """Read the fingerprints of a run: step → fingerprints. Step -1 has the weights that the run began with.

    If a step was made several times, the last one counts.

    Raises:
        RecordError: a file is damaged.
    """
    steps: dict[int, Fingerprints] = {}
    for first, path in sorted(_files(outdir).items()):
        # Steps from here on are made again. Both have a row for the step before: the earlier one has more in it.
        earlier = {}
        for step, taken in steps.items():
            if step < first:
                earlier[step] = taken
        steps = _read(path) | earlier
    return dict(sorted(steps.items()))


def _files(outdir: Path) -> dict[int, Path]:
    """The files of fingerprints, by the step at which the run was started."""
    files = {}
    for path in outdir.glob("fingerprints-*.jsonl"):
        first = path.stem.removeprefix("fingerprints-")
        if first.isdecimal():
            files[int(first)] = path
    return files


def _read(path: Path) -> dict[int, Fingerprints]:
    """Read one file: step → fingerprints."""
    try:
        # What follows the last newline is a line that a killed run has not finished.
        with open_file(path) as file:
            first_line, *lines = file.read().split(b"\n")[:-1]
        header = Header(**parse_json(first_line))
        steps = {}
        for line in lines:
            row = parse_json(line)
            fingerprints = Fingerprints(header, row["ranks"])
            for entry in fingerprints.entries():
                fingerprints.full(entry)
            steps[int(row["step"])] = fingerprints
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RecordError(f"{path} is not a file of fingerprints: {error}") from None
    return steps
