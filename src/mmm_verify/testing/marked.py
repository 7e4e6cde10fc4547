"""A test with the mark ``ranks``: forked ranks run it, and their outcomes become the outcome of the test."""

from __future__ import annotations

import contextlib
import inspect
import math
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

# Seconds that a collective may take beyond the test's time: this process, which knows of all ranks, speaks first.
COLLECTIVE_MARGIN = 30.0
MAX_RANKS = 64
PASSED = "passed"
SKIPPED = "skipped"
XFAILED = "xfailed"

# How a test ended on a rank, and the text of that.
Outcome = tuple[str, str]


class Marked:
    """What the mark of a test asks for.

    Attributes:
        axes: mesh axis → its size; None without a mesh.
        ranks: number of ranks.
        timeout: seconds until all ranks must have ended.
    """

    def __init__(self, mark: pytest.Mark, timeout: float) -> None:
        argument: Any = mark.args[0] if len(mark.args) == 1 else None
        self.axes: dict[str, int] | None = None
        self.timeout = float(mark.kwargs.get("timeout", timeout))
        unknown = set(mark.kwargs) - {"timeout"}
        # True is an int: ranks(True) is a mistake, not one rank.
        if unknown or type(argument) not in (int, str):
            raise pytest.UsageError(
                '@pytest.mark.ranks takes a number or a mesh: ranks(4), ranks("dp2,tp2", timeout=30)'
            )
        if isinstance(argument, str):
            # This module imports torch, which a test without a mesh may not need.
            from mmm_verify.subject import parse_axes

            self.axes = parse_axes(argument)
            argument = math.prod(self.axes.values())
        if not 1 <= argument <= MAX_RANKS:
            raise pytest.UsageError(f"@pytest.mark.ranks: {argument} ranks; write a number from 1 to {MAX_RANKS}")
        self.ranks = argument


def run(item: pytest.Function, device: str, timeout: float) -> None:
    """Run a marked test on its ranks, and end as it ends there.

    Args:
        item: the test.
        device: where ranks compute: cpu, cuda or xpu.
        timeout: seconds that the test may take, if its mark says nothing.

    Raises:
        pytest.UsageError: the mark is wrong.
        Failed, Skipped: as on the ranks.
    """
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    marked = Marked(mark, timeout)
    if inspect.iscoroutinefunction(item.obj):
        raise pytest.UsageError("@pytest.mark.ranks: an async test cannot run on ranks")
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        pytest.fail(
            f"this process has other threads ({', '.join(others)}), whose locks forked ranks would wait for: end them "
            "before the test",
            pytrace=False,
        )
    with contextlib.ExitStack() as stack:
        # One file for each rank: what it prints.
        printed = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(marked.ranks)]
        outcomes: list[Outcome] = []
        failure = ""
        try:
            outcomes = _collect(item, marked, device, printed)
        except RanksFailed as error:
            failure = _message(error, marked)
        _show(printed)
    if failure:
        pytest.fail(failure, pytrace=False)
    _conclude(outcomes)


def _collect(item: pytest.Function, marked: Marked, device: str, printed: Sequence[IO[bytes]]) -> list[Outcome]:
    """Fork the ranks, and wait for their outcomes. Raises RanksFailed."""
    with Children() as children:
        for rank, file in zip(ranks_of(marked.ranks, free_port()), printed, strict=True):
            children.fork(lambda end, rank=rank, file=file: _live(end, item, marked, device, rank, file))  # type: ignore[misc]
        return collect(children.all, marked.timeout)


def _live(
    end: Connection,
    item: pytest.Function,
    marked: Marked,
    device: str,
    rank: Rank,
    printed: IO[bytes],
) -> None:
    """The life of a rank: it runs the test, sends how it ended, and stays until it is killed."""
    # This module imports torch.
    from mmm_verify.ranks.group import process_group

    with _printing_to(printed):
        try:
            own_device = _device(device, rank)
            # Entered and never left: taking the group down would wait for ranks that are still in the test.
            group = process_group(rank, own_device, marked.timeout + COLLECTIVE_MARGIN)
            group.__enter__()
            message: tuple[bool, Outcome] = (True, _run_test(item, marked, own_device.type, rank))
        except BaseException as error:
            title = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
            # A plugin of the user's may not be able to show it.
            except Exception:
                text = "".join(traceback.format_exception(error))
            message = (False, (title, text))
    end.send_bytes(pickle.dumps(message))
    # A rank that ends closes its connections. Ranks that wait for it would then fail with "connection closed", and
    # nobody would say which rank they waited for.
    end.poll(None)


def _run_test(item: pytest.Function, marked: Marked, device: str, rank: Rank) -> Outcome:
    """Call the test's function, with this rank's own `mesh` and `rank`. Returns how it ended."""
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
    """A rank's device: ranks share the devices in turn."""
    import torch

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
    """Inside, what this process prints goes to a file, whichever way of capturing pytest uses."""
    with open(os.dup(file.fileno()), "w", encoding="utf-8", errors="replace", buffering=1) as stream:
        # Standard output and error of C code, such as NCCL's, too.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = stream
        try:
            yield
        finally:
            stream.flush()


def _show(printed: Sequence[IO[bytes]]) -> None:
    """Print what each rank has printed, so that pytest shows it with the test."""
    for rank, file in enumerate(printed):
        size = os.fstat(file.fileno()).st_size
        # The rank and this process share the file's position: pread does not use it.
        text = os.pread(file.fileno(), size, 0).decode("utf-8", "replace").rstrip()
        for line in text.splitlines():
            print(f"[rank {rank}] {line}")


def _message(error: RanksFailed, marked: Marked) -> str:
    """The failure message of a test that failed on a rank."""
    # Without frames, a rank raised or died: its traceback is in the details.
    if not error.frames:
        return f"{error}\n{error.details.rstrip()}"
    lines = [str(error), blame(error.frames, marked.ranks)]
    for rank, stack in error.frames.items():
        # faulthandler lists the innermost frame first: after the test's frame come those of this file, then pytest's.
        test_frames = stack.partition(__file__)[0].rpartition("\n")[0]
        lines.append(f"rank {rank}:\n{test_frames}")
    return "\n".join(lines)


def _conclude(outcomes: list[Outcome]) -> None:
    """End the test as it ended on all ranks, or fail it if it did not end alike."""
    kinds = {kind for kind, _ in outcomes}
    if kinds == {PASSED}:
        return
    left = [rank for rank, (kind, _) in enumerate(outcomes) if kind != PASSED]
    text = outcomes[left[0]][1]
    if kinds == {SKIPPED}:
        pytest.skip(text)
    if kinds == {XFAILED}:
        pytest.xfail(text)
    pytest.fail(f"rank {listed(left)} left the test ({text}), but the others did not", pytrace=False)
