"""Copies of a run's state in the memory of its hosts, for ranks that go on after others have died.

A copy is a checkpoint in a folder in memory, which outlives the ranks (`mmm.launch.host.memory`). On one host it is
whole. Of several hosts each has the files of its own ranks and those of the host before it, so that one that is lost
takes none with it:

    host            a             b             c
    own ranks'      __0_ __1_     __2_ __3_     __4_ __5_
    replicas        __4_ __5_     __0_ __1_     __2_ __3_
    on each         .metadata, checkpoint.json

A new copy is complete on all hosts before the one before it is removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from mmm.checkpoint.manifest import (
    CHUNK,
    MANIFEST,
    FileSum,
    Manifest,
    broken_file,
    complete,
    discard,
    read_manifest,
    remove,
    remove_partial,
    steps_of,
)
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.storage import METADATA, Writer
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.runtime.process_group import broadcast_object

LOST = -1  # the size of a file that its rank could not write
Move = tuple[int, int, str]  # a file's way: from rank, to rank, name


class Replica(NamedTuple):
    """One that some host has. digest: of its manifest, the same on all hosts."""

    step: int
    digest: str


@dataclass(frozen=True)
class HostMemory:
    """This rank's place among the folders in memory.

    Attributes:
        folder: of this rank's host. folders: of each rank's. rank: this one. group: of all, for this alone; it sends
            from the host.
    """

    folder: Path
    folders: tuple[str, ...]
    rank: int
    group: dist.ProcessGroup

    @classmethod
    def find(cls, folder: Path) -> HostMemory:
        """A collective."""
        own = cls(folder, (), dist.get_rank(), dist.new_group(backend="gloo"))
        return replace(own, folders=tuple(own.gather(str(folder))))

    @cached_property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks that have each folder, the first of which does what is done once a host."""
        found: dict[str, list[int]] = {}
        for rank, folder in enumerate(self.folders):
            found.setdefault(folder, []).append(rank)
        return found

    @property
    def local(self) -> list[int]:
        return self.hosts[str(self.folder)]

    @property
    def is_first(self) -> bool:
        return self.local[0] == self.rank

    def neighbours(self) -> list[tuple[int, int]]:
        """Each rank and the one, on the next host, whose host keeps its file as well; those first that do not wait for
        each other. None on one host."""
        hosts = list(self.hosts.values())
        if len(hosts) == 1:
            return []
        pairs = []
        for number, ranks in enumerate(hosts):
            others = hosts[(number + 1) % len(hosts)]
            pairs += [(number % 2, rank, others[at % len(others)]) for at, rank in enumerate(ranks)]
        return [(rank, other) for _, rank, other in sorted(pairs)]

    def transfer(self, moves: Iterable[Move], folder: Path) -> None:
        """Send files between hosts. A collective: the same moves in the same order on all.

        Raises:
            CheckpointError: one could not be written here, or read there; after all moves.
        """
        problem = ""
        for source, target, name in moves:
            if self.rank == source:
                self._send(folder / name, target)
            elif self.rank == target:
                problem = self._receive(folder / name, source) or problem
        if problem:
            raise CheckpointError(problem)

    def _send(self, path: Path, target: int) -> None:
        size = path.stat().st_size if path.exists() else LOST
        dist.send(torch.tensor([size]), target, group=self.group)
        if size > 0:
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            for chunk in data.split(CHUNK):
                dist.send(chunk, target, group=self.group)

    def _receive(self, path: Path, source: int) -> str:
        """Write what comes; what is wrong. All is taken, also where there is no room for it."""
        head = torch.empty(1, dtype=torch.int64)
        dist.recv(head, source, group=self.group)
        left, problem, file = int(head), "", None
        if left == LOST:
            return ""  # this rank has nothing of its own, or says itself what is wrong
        with ExitStack() as stack:
            while left:
                chunk = torch.empty(min(left, CHUNK), dtype=torch.uint8)
                dist.recv(chunk, source, group=self.group)
                left -= len(chunk)
                try:
                    if file is None:
                        file = stack.enter_context(open(path, "wb"))
                    if not problem:
                        file.write(chunk.numpy().data)
                        file.flush()
                except OSError as error:
                    problem = f"{path} cannot be written: {reason(error)}"
        return problem

    # To go on.

    def replicas(self) -> list[Replica]:
        """Those that a host has, the newest first. A collective."""
        found = []
        for path in steps_of(self.folder) if self.is_first else []:
            try:
                found.append(Replica(read_manifest(path).step, _digest(path)))
            except CheckpointError:
                continue
        return sorted({copy for of_host in self.gather(found) for copy in of_host}, reverse=True)

    def check(self, copy: Replica) -> tuple[Manifest, str | None]:
        """A copy's manifest, and why it cannot be put together; None if each file is whole on some host. A collective.

        A file that is damaged is removed, so that another host's can take its place.
        """
        path = self.path(copy.step)
        there = (path / MANIFEST).exists() and _digest(path) == copy.digest
        source = next(rank for rank, has in enumerate(self.gather(there)) if has)
        if not there and self.is_first:
            remove([path])
        manifest: Manifest = broadcast_object(read_manifest(path) if self.rank == source else None, source, self.group)
        problems, own = [], self.local.index(self.rank)
        for name in sorted(manifest.files)[own :: len(self.local)] if there else []:
            if (path / name).exists() and (broken := broken_file(path, {name: manifest.files[name]})) is not None:
                problems.append(broken)
                (path / name).unlink(missing_ok=True)
        problems = [text for of_rank in self.gather(problems) for text in of_rank]
        stored = {name for of_host in self.gather(self._stored(path)) for name in of_host}
        missing = sorted(manifest.files.keys() - stored)
        if missing:
            gone = f"no host that is left has {missing[0]} of the copy of step {copy.step} in memory"
            return manifest, next(iter(problems), gone)
        path.mkdir(exist_ok=True)
        self.fetch(path, manifest.files, [METADATA] if self.rank == 0 else [])
        return manifest, None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def fetch(self, path: Path, files: Mapping[str, FileSum], names: Sequence[str]) -> None:
        """Get files that this rank needs from the hosts that have them. A collective.

        Raises:
            CheckpointError: one did not come as it was written; on every rank.
        """
        stored = dict(enumerate(self.gather(self._stored(path))))
        moves: set[Move] = set()
        for rank, needed in enumerate(self.gather([*names])):
            first = self.hosts[self.folders[rank]][0]
            for name in set(needed) - stored[first]:
                moves.add((next(other for other in stored if name in stored[other]), first, name))
        self.transfer(sorted(moves), path)
        broken = broken_file(path, {name: files[name] for _, target, name in moves if target == self.rank})
        if problem := next(filter(None, self.gather(broken)), None):
            raise CheckpointError(problem, on_every_rank=True)

    def keep_only(self, step: int | None) -> None:
        """Remove all copies but the one of this step: the run goes on from there. A collective."""
        if self.is_first:
            remove([path for path in steps_of(self.folder) if path != self.path(step or 0)])
            remove_partial(self.folder)
        self.gather(None)

    def _stored(self, path: Path) -> set[str]:
        return set(os.listdir(path)) if self.is_first and path.exists() else set()

    def gather(self, local: Any) -> list[Any]:
        """Every rank's, on every rank. A collective."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, local, group=self.group)
        return everyones


def _digest(path: Path) -> str:
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


class _Writer(Writer):
    """Sends each rank's file to its neighbour as well."""

    def __init__(self, path: Path, finished: Any, memory: HostMemory) -> None:
        super().__init__(path, finished)
        self.memory, self.sync_files = memory, False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        moves = [(rank, other, f"__{rank}_0.distcp") for rank, other in self.memory.neighbours()]
        try:
            return super().write_data(plan, planner)
        except BaseException:
            (self._folder / f"__{self.memory.rank}_0.distcp").unlink(missing_ok=True)
            raise
        finally:
            self.memory.transfer(moves, self._folder)


@dataclass
class ReplicaSaver(Saver):
    """Saves into the memory of the hosts."""

    memory: HostMemory | None = None

    def write(self, state: dict[str, Any], manifest: Manifest) -> None:
        assert self.memory is not None
        try:
            self._write(self.memory, state, manifest)
        except BaseException:
            if self.memory.is_first:
                discard(self.partial(manifest.step))
            raise

    def _write(self, memory: HostMemory, state: dict[str, Any], manifest: Manifest) -> None:
        partial = self.partial(manifest.step)

        def finished(files: dict[str, FileSum]) -> None:
            replace(manifest, files=files).write(partial)

        dcp.save(state, storage_writer=_Writer(partial, finished, memory), process_group=self.group)
        names = (METADATA, MANIFEST)
        contents = [(partial / name).read_bytes() if memory.rank == 0 else b"" for name in names]
        if len(memory.hosts) > 1:
            contents = broadcast_object(contents, group=self.group)
        problem = None
        if memory.is_first:
            try:
                for name, content in zip(names, contents, strict=True):
                    (partial / name).write_bytes(content)
            except OSError as error:
                problem = f"{partial} cannot be written: {reason(error)}"
        if problem := next(filter(None, memory.gather(problem)), None):
            raise CheckpointError(problem)
        if memory.is_first:
            complete(partial, keep=2, keep_every=None)
        memory.gather(None)  # all have it
        if memory.is_first:
            remove(steps_of(self.folder)[1:])
