"""``verify_program``: runs a script on one rank and on several, and compares two of its steps."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

from mmm_verify.errors import ConfigError, LayoutError
from mmm_verify.program.compare import compare
from mmm_verify.program.recorder import Recorder, Recording
from mmm_verify.program.script import Script, live
from mmm_verify.ranks.children import Children
from mmm_verify.ranks.ranks import RanksFailed, blame, collect, free_port, ranks_of
from mmm_verify.run import TIMEOUT, import_all
from mmm_verify.subject import MAX_RANKS
from mmm_verify.torch_private import import_dynamo
from mmm_verify.verdict import NOT_COMPARABLE, Verdict

# Frames with one of these in their path are not the script's: verify's own, and those of the import system.
STARTED_BY = (str(Path(__file__).parents[1]), "<frozen ")
# -1 is a value.
FLAG = re.compile(r"--?[A-Za-z]")
# How often the run on one rank is repeated with weights that are moved by one rounding, to measure the noise.
NUDGED = 2
# Seconds without a change after which a checkpoint that is written in the background is complete.
QUIET = 0.3


class NotRun(Exception):
    """A script did not take its steps. The message says why.

    Attributes:
        details: its traceback, or the end of what it printed.
    """

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason)
        self.details = details


def verify_program(
    argv: Sequence[str],
    ranks: Sequence[int] = (1, 4),
    *,
    one_rank_args: Sequence[str] = (),
    timeout: float = TIMEOUT,
    verbose: bool = False,
) -> Verdict:
    """Check whether an unedited script computes the same on several ranks as on one.

    The script runs as torchrun would start it, on CPU ranks of this host, in the working directory. It is ended after
    its second optimizer step. What it writes until then, it writes.

    Args:
        argv: the script and its arguments: ``["train.py", "--lr", "0.1"]``, or ``["-m", "package.module"]``.
        ranks: 1, and the number of ranks to compare with.
        one_rank_args: further arguments of the script on one rank, such as a batch size that gives the same global
            batch. Their flags take the place of the same flags in `argv`.
        timeout: seconds that each run may take.
        verbose: whether to show what rank 0 prints.

    Returns:
        The verdict. Its truth value is True if the two are the same.

    Raises:
        ConfigError: there is no such script, or `ranks` cannot be compared.
        LayoutError: there are too many ranks.
    """
    script = script_of(argv)
    n_ranks = _ranks_to_compare(ranks)
    alone = replace(script, args=in_place_of(script.args, one_rank_args))
    # Each rank would otherwise spend a second on this import.
    import_dynamo()
    try:
        # One after another: two runs of a script may write to one file.
        first_seed = partial(Recorder, seed=0, nudge=None)
        (one,) = record(alone, 1, timeout, verbose, partial(first_seed, known=()))
        import_all(one.imported)
        # A rank that has a whole sample need not send it: of a field, or an image, that is most of what it would send.
        known = {sample.digest for sample in chain(*one.samples)}
        recordings = record(script, n_ranks, timeout, verbose, partial(first_seed, known=known))
        nudged = []
        # The first run has drawn with seed 0.
        for seed in range(1, NUDGED + 1):
            nudged += record(alone, 1, timeout, False, partial(Recorder, seed=seed, nudge=one.dtype))
    except NotRun as error:
        return Verdict(NOT_COMPARABLE, script.name, n_ranks, reason=str(error), details=error.details, dtype="")
    return compare(script.name, one, nudged, recordings)


def in_place_of(args: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """The arguments of a script, with others in place of those of the same flags: some scripts take no flag twice.

    A flag is given up with as many values as it has among the others.
    """
    # Flag → how many arguments follow it.
    widths: dict[str, int] = {}
    flag = ""
    for argument in others:
        if FLAG.match(argument):
            flag, equals, _ = argument.partition("=")
            widths[flag] = len(equals)
        elif flag:
            widths[flag] += 1
    own = []
    left_out = 0
    for argument in args:
        flag, equals, _ = argument.partition("=")
        if flag in widths:
            left_out = 0 if equals else widths[flag]
        elif left_out:
            left_out -= 1
        else:
            own.append(argument)
    return (*own, *others)


def script_of(argv: Sequence[str], flag: str = "--program") -> Script:
    """The script that a command line names. Raises ConfigError if it names none, or one that does not exist."""
    is_module = argv[:1] == ["-m"]
    if is_module:
        argv = argv[1:]
    if not argv:
        raise ConfigError(f"{flag} names no script: write {flag} train.py, or {flag} -m package.module")
    name, *args = argv
    script = Script(name, is_module, tuple(args))
    script.check(flag)
    return script


def _ranks_to_compare(ranks: Sequence[int]) -> int:
    """The number of ranks that is compared with one rank."""
    first, *others = ranks
    if first != 1 or len(others) != 1 or others[0] < 2:
        counts = ",".join(map(str, ranks))
        raise ConfigError(
            f"--ranks {counts}: write 1 and the number of ranks to compare with, such as 1,4. The run on one rank has "
            "all weights in full; a script that cannot run on one rank needs its functions: see --help"
        )
    n_ranks = others[0]
    if n_ranks > MAX_RANKS:
        raise LayoutError(f"--ranks 1,{n_ranks}: they run on this host's CPU, {MAX_RANKS} at most")
    return n_ranks


def record(
    script: Script,
    n_ranks: int,
    timeout: float,
    verbose: bool,
    make_recorder: Callable[[Callable[[Recording], None]], Recorder],
    folder: Path | None = None,
) -> list[Recording]:
    """Run a script on forked ranks, and return what each of them has seen.

    Args:
        script, timeout, verbose: see `verify_program`.
        n_ranks: number of ranks.
        make_recorder, folder: see `live`.

    Raises:
        NotRun: it has failed on a rank, hung, or ended before its last step. None of the ranks is left.
    """
    where = "on one rank"
    if n_ranks > 1:
        where = f"on {n_ranks} ranks"
    with contextlib.ExitStack() as stack:
        # The children write to these files, which are closed after the children have ended.
        outputs: list[IO[bytes] | None] = []
        for _ in range(n_ranks):
            outputs.append(stack.enter_context(tempfile.TemporaryFile()))
        children = stack.enter_context(Children())
        for rank in ranks_of(n_ranks, free_port()):
            output = outputs[rank.rank]
            # Rank 0 prints to the terminal.
            if verbose and rank.rank == 0:
                output = None
            main = partial(live, rank=rank, script=script, make_recorder=make_recorder, folder=folder, output=output)
            children.fork(main)
        try:
            recordings: list[Recording] = collect(children.all, timeout)
        except RanksFailed as error:
            reason = str(error)
            if n_ranks == 1:
                reason = reason.removeprefix("rank 0: ")
            elif error.frames:
                reason += f": {blame(error.frames, n_ranks)}"
            raise NotRun(f"{where}: {reason}", _of_the_script(error.details)) from None
        if folder is not None:
            _wait_for_files(folder)
    return recordings


def _of_the_script(frames: str) -> str:
    """Keep those frames of ranks that hang that are the script's or a library's, without what has started it."""
    lines = []
    for line in frames.splitlines():
        if not any(path in line for path in STARTED_BY):
            lines.append(line)
    return "\n".join(lines)


def _wait_for_files(folder: Path) -> None:
    """Wait until no file of a folder changes: a script may write its checkpoint in the background."""
    is_quiet = False
    while not is_quiet:
        latest = 0.0
        for path in folder.rglob("*"):
            # A file may be renamed as soon as it is complete.
            with contextlib.suppress(FileNotFoundError):
                latest = max(latest, path.lstat().st_mtime)
        is_quiet = time.time() - latest > QUIET
        time.sleep(QUIET / 4)
