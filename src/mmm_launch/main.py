"""The `launch` command."""

import os
import resource
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from mmm_launch import contract, streams
from mmm_launch.channel.failures import say
from mmm_launch.errors import LaunchError, UserError
from mmm_launch.files import printable_lines
from mmm_launch.program import target
from mmm_launch.program.target import Target
from mmm_launch.run.control import Run, Transport
from mmm_launch.spec import cluster, local, stage, walltime
from mmm_launch.spec.launch_spec import LOCAL, LaunchSpec, Value
from mmm_launch.spec.options import LaunchOptions, count, launch_options, parser, seconds, split, untold
from mmm_launch.spec.stage import Stage

LEAST_FILES = 64

__all__ = ["main", "parser", "split"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch` with these words (default: the command line's) and return its exit code."""
    begin = time.time()
    words = list(sys.argv[1:] if argv is None else argv)
    streams.take_any_text()
    try:
        contract.check_folder()
        check_files()
        return _main(words, begin)
    except UserError as error:
        print(f"launch: error: {printable_lines(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there are ranks; later it is passed on to them
        return 130


def check_files() -> None:
    """Raises `LaunchError`: this process may not open enough files to start any rank."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES and (limit := contract.open_files()) < LEAST_FILES:
        raise LaunchError(f"a process may have {limit} files open here, and launch needs {LEAST_FILES}: ulimit -n 1024")


def _main(words: list[str], begin: float) -> int:
    given, command = split(words)
    args = parser().parse_args(given)
    options = launch_options(args)
    timeout = seconds("--timeout", args.timeout)
    start_timeout = seconds("--start-timeout", args.start_timeout) or 0.0
    grace = seconds("--grace", args.grace)
    retries = count("--retries", args.retries, least=0)
    if not command:
        raise LaunchError("no command to launch.\n  Try: launch -n 4 python3 -m mmm.examples.fsdp_tp")
    what = target.parse(command)
    target.check(what)
    shared = {
        contract.LINE_VARIABLE: shlex.join(["launch", *untold(words)]),
        contract.ATTEMPTS_VARIABLE: uuid.uuid4().hex,
        **startup(os.environ, begin),
    }
    plan = plan_run(what, options, shared)
    for note in [*plan.notes, *(stage.notes(options.stage) if options.stage is not None else [])]:
        say(f"launch: {note}")
    limits = walltime.limits(timeout, args.signal, args.walltime, plan.job)
    limits = replace(limits, grace=grace)
    if args.dry_run:
        try:
            print(describe(plan), flush=True)
        except OSError:  # `| head`, a full disk: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return 0
    streams.never_fail()
    return run_attempts(what, plan, options, limits, start_timeout, retries, shared)


def run_attempts(
    what: target.Target,
    plan: LaunchSpec,
    options: LaunchOptions,
    limits: walltime.Limits,
    start_timeout: float,
    retries: int | None,
    shared: dict[str, str],
) -> int:
    """Start a plan, and where it fails, plan and start again, as `Attempts` says; the exit code of the last."""
    from mmm_launch.run.attempts import Attempts

    staged: AbstractContextManager[Stage | None] = nullcontext()
    if options.stage is not None:
        from mmm_launch.host.stage import packed

        staged = packed(options.stage)
    with staged as stage_of_run:
        options = replace(options, stage=stage_of_run)
        plan = replace(plan, stage=stage_of_run)
        announce(plan)
        attempts = Attempts(plan, retries)
        while True:
            plan.shared[contract.ATTEMPT_VARIABLE] = Value(str(attempts.number), "launch")
            if plan.elastic is not None:
                bounds = f"{plan.elastic.least}:{plan.elastic.most}"
                plan.shared[contract.ELASTIC_VARIABLE] = Value(bounds, "--elastic")
            with local_copy(plan) as copy:
                run = Run(transport(plan, start_timeout, copy), plan.ranks, limits)
                code = run.run()
            if code == 0 or not attempts.go_on(run, code):
                return code
            # The start-up of the next attempt is its own.
            shared.pop(contract.STARTED_VARIABLE, None)
            os.environ.pop(contract.STARTED_VARIABLE, None)
            shared[contract.BEGAN_VARIABLE] = repr(time.time())
            places = attempts.in_use() if plan.elastic is not None else {}
            plan = plan_run(what, replace(options, attempt=attempts.number, places=places), shared)


@contextmanager
def local_copy(plan: LaunchSpec) -> Iterator[str | None]:
    """Unpacks the environment on this host, where launch itself holds the ranks. On others their agents do."""
    if plan.stage is None or not plan.is_local:
        yield None
        return
    from mmm_launch.host.stage import unpack

    copy = unpack(plan.stage)
    try:
        yield copy.path
    finally:
        copy.remove()


def startup(environ: Mapping[str, str], otherwise: float) -> dict[str, str]:
    """What the ranks are told of when launch was started, and the job."""
    told = {name: environ[name] for name in (contract.STARTED_VARIABLE,) if environ.get(name)}
    told[contract.BEGAN_VARIABLE] = repr(contract.process_start() or otherwise)
    return told


def plan_run(what: Target, options: LaunchOptions, shared: dict[str, str]) -> LaunchSpec:
    """The plan for the job's hosts, or for this one where there is no job. shared: variables of launch's own."""
    plan = cluster.plan(what, options)
    plan = plan or local.plan(what, options)
    plan.shared.update({name: Value(value, "launch" if not plan.is_local else "") for name, value in shared.items()})
    return plan


def describe(plan: LaunchSpec) -> str:
    from mmm_launch.spec import table

    if not plan.is_local:
        return table.table(plan, explain=True)
    from mmm_launch.program.preloads import preloads

    host = local.host_spec(plan)
    modules = tuple(each.module for each in preloads(plan.target)) if host.fork else ()
    return table.table(plan, True, host, modules)


def announce(plan: LaunchSpec) -> None:
    """Say what was found, where that is more than this host."""
    if plan.launcher.value != LOCAL:
        from mmm_launch.spec.table import table

        print(table(plan), file=sys.stderr, flush=True)


def transport(plan: LaunchSpec, start_timeout: float, copy: str | None) -> Transport:
    """What will start the ranks. copy: of an environment, by which this host's ranks run."""
    if plan.is_local:
        from mmm_launch.run.local import LocalRanks

        return LocalRanks(local.host_spec(plan, copy))
    from mmm_launch.run.backend import Backend

    return Backend(plan, start_timeout)
