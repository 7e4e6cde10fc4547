"""A test with the mark ``ranks``: forked ranks run it, and their outcomes become that of the test."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import pytest

from mmm_verify.ranks.children import Children
from mmm_verify.ranks.ranks import Rank, RanksFailed, blame, collect, free_port, listed, ranks_of

MORE = 30.0  # s that a collective may take beyond the test's time: the parent speaks first, of all ranks
MOST_RANKS = 64
OURS, NEXT = __file__, "\n"  # in a stack, and between its frames
PASSED, SKIPPED, XFAILED = "passed", "skipped", "xfailed"


class Marked:
    """What the mark of a test asks for.

    Attributes:
        axes: of the mesh, by name; None without one. ranks: their number. timeout: seconds until all have ended.
    """

    def __init__(self, mark: pytest.Mark, timeout: float) -> None:
        asked = mark.args[0] if len(mark.args) == 1 else None
        mesh = asked if isinstance(asked, str) else mark.kwargs.get("mesh")
        self.axes: dict[str, int] | None = None
        if mesh is not None:
            from mmm_verify.subject import parse_axes  # imports torch

            self.axes = parse_axes(mesh)
        size = 1
        for count in (self.axes or {}).values():
            size *= count
        self.ranks = asked if isinstance(asked, int) else size
        self.timeout = float(mark.kwargs.get("timeout", timeout))
        wrong = set(mark.kwargs) - {"mesh", "timeout"}
        if wrong or not isinstance(self.ranks, int) or isinstance(self.ranks, bool) or len(mark.args) > 1:
            raise pytest.UsageError(
                '@pytest.mark.ranks takes a number or a mesh: ranks(4), ranks("dp2,tp2", timeout=30)'
            )
        if not 1 <= self.ranks <= MOST_RANKS or (self.axes is not None and size != self.ranks):
            raise pytest.UsageError(
                f"@pytest.mark.ranks: {self.ranks} ranks, of a mesh of {size}; they are 1 to {MOST_RANKS}, and equal"
            )


def run(item: pytest.Function, device: str, timeout: float) -> None:
    """Run a marked test on its ranks, and end as it ends there.

    Raises:
        pytest.UsageError: the mark is wrong. Failed, Skipped: as on the ranks.
    """
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    marked = Marked(mark, timeout)
    if inspect.iscoroutinefunction(item.obj):
        raise pytest.UsageError("@pytest.mark.ranks: an async test cannot run on ranks")
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        pytest.fail(
            f"this process has other threads ({', '.join(others)}), whose locks forked ranks would wait for: end them "
            "before the test",
            pytrace=False,
        )
    with contextlib.ExitStack() as stack:
        written = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(marked.ranks)]
        outcomes: list[tuple[str, str]] = []
        failure = ""
        try:
            outcomes = _collect(item, marked, device, written)
        except RanksFailed as error:
            failure = _message(error, marked)
        _show(written)
    if failure:
        pytest.fail(failure, pytrace=False)
    _conclude(outcomes)


def _collect(item: pytest.Function, marked: Marked, device: str, written: Sequence[IO[bytes]]) -> list[tuple[str, str]]:
    with Children() as children:
        for rank, file in zip(ranks_of(marked.ranks, free_port()), written, strict=True):
            children.fork(lambda end, rank=rank, file=file: _live(end, item, marked, device, rank, file))  # type: ignore[misc]
        return collect(children.all, marked.timeout)


def _live(end: Connection, item: pytest.Function, marked: Marked, device: str, rank: Rank, written: IO[bytes]) -> None:
    """A rank's life: the test, how it ended, and then to stay until all have ended: who leaves takes the connections
    away from those that still wait for it, who would say that and not whom they wait for."""
    from mmm_verify.ranks.group import process_group  # imports torch

    with _printing_to(written):
        try:
            chosen = _device(device, rank)
            group = process_group(rank, chosen, marked.timeout + MORE)
            group.__enter__()
            message: tuple[bool, tuple[str, str]] = (True, _run_test(item, marked, chosen.type, rank))
        except BaseException as error:
            lines = f"{type(error).__name__}: {error}".splitlines()
            try:
                text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
            except Exception:  # a plugin of the user's that cannot show it
                text = "".join(traceback.format_exception(error))
            message = (False, (lines[0], text))
    end.send_bytes(pickle.dumps(message))
    end.poll(None)


def _run_test(item: pytest.Function, marked: Marked, device: str, rank: Rank) -> tuple[str, str]:
    """Call the test's function, with this rank's own `mesh` and `rank`. Returns how it ended, and why."""
    os.environ |= {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "MASTER_ADDR": rank.address,
        "MASTER_PORT": str(rank.port),
    }
    wanted = inspect.signature(item.obj).parameters
    arguments = {name: value for name, value in item.funcargs.items() if name in wanted}
    if "mesh" in arguments:
        arguments["mesh"] = _mesh(marked, device)
    if "rank" in arguments:
        arguments["rank"] = rank.rank
    try:
        item.obj(**arguments)
    except pytest.skip.Exception as skipped:
        return SKIPPED, str(skipped)
    except pytest.xfail.Exception as expected:
        return XFAILED, str(expected)
    return PASSED, ""


def _device(kind: str, rank: Rank) -> Any:
    """The device of a rank: one of those that there are, in turn; of ``auto`` an accelerator where there is one."""
    import torch

    if kind == "auto":
        kind = next((name for name in ("cuda", "xpu") if getattr(torch, name).is_available()), "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    devices = getattr(torch, kind)
    if not devices.is_available():
        raise pytest.UsageError(f"--ranks-device {kind}: PyTorch {torch.__version__} sees no such device here")
    device = torch.device(kind, rank.rank % devices.device_count())
    devices.set_device(device)
    return device


def _mesh(marked: Marked, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    axes = marked.axes or {"dp": marked.ranks}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextlib.contextmanager
def _printing_to(file: IO[bytes]) -> Iterator[None]:
    """What this process prints goes to a file, whatever way of capturing pytest has."""
    with open(os.dup(file.fileno()), "w", encoding="utf-8", errors="replace", buffering=1) as stream:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = stream
        try:
            yield
        finally:
            stream.flush()


def _show(written: Sequence[IO[bytes]]) -> None:
    """Print what each rank has printed, so that pytest has it with the test."""
    for number, file in enumerate(written):
        size = os.fstat(file.fileno()).st_size
        if text := os.pread(file.fileno(), size, 0).decode("utf-8", "replace").rstrip():
            print("\n".join(f"[rank {number}] {line}" for line in text.splitlines()))


def _message(error: RanksFailed, marked: Marked) -> str:
    """What a test that failed on a rank says."""
    if not error.frames:
        return f"{error}\n{error.details.rstrip()}"
    # From the innermost frame down to the test; below it are ours, and pytest's.
    where = [f"rank {rank}:\n{stack.partition(OURS)[0].rpartition(NEXT)[0]}" for rank, stack in error.frames.items()]
    return "\n".join([str(error), blame(error.frames, marked.ranks), *where])


def _conclude(outcomes: list[tuple[str, str]]) -> None:
    kinds = {kind for kind, _ in outcomes}
    skipped = [rank for rank, (kind, _) in enumerate(outcomes) if kind != PASSED]
    if kinds == {PASSED}:
        return
    text = outcomes[skipped[0]][1]
    if kinds == {SKIPPED}:
        pytest.skip(text)
    if kinds == {XFAILED}:
        pytest.xfail(text)
    pytest.fail(f"rank {listed(skipped)} left the test ({text}), and the others did not", pytrace=False)
