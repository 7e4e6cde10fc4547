"""The `launch` command."""

import argparse
import os
import resource
import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from mmm import contract, streams
from mmm.errors import LaunchError, UserError
from mmm.launch.channel.failures import say
from mmm.launch.channel.wire import CPUS_VARIABLE
from mmm.launch.control.run import RunControl
from mmm.launch.job import binding, cluster, local, scheduler, stage, target, walltime
from mmm.launch.job.cluster import ClusterPlan
from mmm.launch.job.local import LaunchPlan
from mmm.launch.job.options import MAX_RANKS, LaunchOptions, count, launch_options, parser, seconds, split, untold
from mmm.launch.job.target import Target
from mmm.outside import printable_lines

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
    its_job = plan.job if isinstance(plan, ClusterPlan) else scheduler.detect(os.environ, options.scheduler)
    limits = walltime.limits(timeout, args.signal, args.walltime, its_job, os.environ)
    limits = replace(limits, grace=grace)
    if args.dry_run or args.explain:
        try:
            print(describe(plan, args, options), flush=True)
        except OSError:  # `| head`, a full disk: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return 0
    streams.never_fail()
    if options.elastic is not None and isinstance(plan, ClusterPlan):
        from mmm.launch.control.elastic import ElasticController

        announce(plan)
        return ElasticController(plan, limits, start_timeout, retries).run()
    return run_attempts(what, plan, options, limits, start_timeout, retries or 0, shared)


def run_attempts(
    what: target.Target,
    plan: LaunchPlan | ClusterPlan,
    options: LaunchOptions,
    limits: walltime.Limits,
    start_timeout: float,
    retries: int,
    shared: dict[str, str],
) -> int:
    """Start a plan, and where it fails, plan and start again, up to `retries` times; the exit code of the last."""
    staged: AbstractContextManager[str | None] = nullcontext()
    if options.stage is not None and isinstance(plan, LaunchPlan):
        from mmm.launch.staging.host import on_this_host

        staged = on_this_host(options.stage)
    memory: AbstractContextManager[None] = nullcontext()
    if retries and isinstance(plan, LaunchPlan):
        from mmm.launch.host.memory import host_memory

        memory = host_memory()
    with memory, staged as copy:
        for attempt in range(retries + 1):
            if attempt:  # whose start-up is its own
                for told in (shared, os.environ):
                    told.pop(contract.STARTED_VARIABLE, None)
                shared[contract.BEGAN_VARIABLE] = repr(time.time())
                plan = plan_run(what, replace(options, attempt=attempt), shared)
            if copy is not None and options.stage is not None and isinstance(plan, LaunchPlan):
                plan = local.from_copy(plan, options.stage.source, copy)
            plan.shared[contract.ATTEMPT_VARIABLE] = str(attempt)
            run = start(plan, limits, start_timeout, attempt)
            run.attempts_left = retries - attempt
            code = run.run()
            if code == 0 or not run.again or attempt == retries:
                return code
            left = retries - attempt
            print(f"launch: exit code {code}: starting again (--retries; {left} left)", file=sys.stderr, flush=True)
        return code


def startup(environ: Mapping[str, str], otherwise: float) -> dict[str, str]:
    """What the ranks are told of when launch was started, and the job. Raises `LaunchError` as `contract.started`."""
    told = {name: environ[name] for name in (contract.STARTED_VARIABLE,) if environ.get(name)}
    told[contract.BEGAN_VARIABLE] = repr(contract.process_start() or otherwise)
    contract.started(told, otherwise)
    return told


def plan_run(what: Target, options: LaunchOptions, shared: dict[str, str]) -> ClusterPlan | LaunchPlan:
    """The plan for the job's hosts, or for this one where there is no job."""
    plan: ClusterPlan | LaunchPlan | None = cluster.plan(what, options)
    if plan is None:
        check_here(options)
        this = replace(options, hosts="localhost")
        plan = plan_here(what, options) if options.elastic is None else cluster.plan(what, this)
    assert plan is not None
    plan.shared.update(shared)
    return plan


def check_here(options: LaunchOptions) -> None:
    """Raises `LaunchError` for options that only a cluster has."""
    only = {
        "--mpiexec": options.mpiexec,
        "--mpi": options.mpi,
        "--launcher-args": " ".join(options.launcher_args),
        "--ranks-by": options.by if options.by != "rank" and options.elastic is None else None,
        "--site": options.site,
        "--spare-hosts": ",".join(options.spare),
    }
    for name, value in only.items():
        if value:
            raise LaunchError(
                f"{name} {value}: ranks on this host alone are started by launch itself. Name the hosts "
                "(--hosts, --hostfile), or start inside a PBS or Slurm job."
            )
    if options.nhosts not in (None, 1):
        raise LaunchError(
            f"-N {options.nhosts}: this is one host, in no PBS or Slurm job. Name the hosts: --hosts a,b, "
            "or --hostfile FILE."
        )
    if options.nproc and options.per_host and options.nproc != options.per_host:
        raise LaunchError(f"-n {options.nproc} -ppn {options.per_host}: on one host they are the same. Leave one out.")
    ranks = options.nproc or options.per_host
    if ranks is not None and ranks > MAX_RANKS:
        raise LaunchError(f"-n {ranks}: the number of ranks on a host must be from 1 to {MAX_RANKS}.")


def plan_here(what: Target, options: LaunchOptions) -> LaunchPlan:
    """Ranks on this host alone."""
    plan = local.plan(what, nproc=options.nproc or options.per_host, device=options.device, prefork=options.prefork)
    if options.cpu_bind is not None and options.cpu_bind != "none":
        each = [cpus or "" for cpus in binding.split(options.cpu_bind, len(plan.ranks))]
        for rank, cpus in zip(plan.ranks, each, strict=True):
            rank[CPUS_VARIABLE] = cpus
        if not os.environ.get("OMP_NUM_THREADS") and "OMP_NUM_THREADS" not in options.env:
            binding.set_threads(plan.shared, plan.ranks, [len(binding.cpu_list(cpus)) for cpus in each])
            plan.why["OMP_NUM_THREADS"] = f"--cpu-bind {options.cpu_bind}"
    for name, value in options.env.items():
        plan.shared[name], plan.why[name] = value, "--env"
    return plan


def describe(plan: ClusterPlan | LaunchPlan, args: argparse.Namespace, options: LaunchOptions) -> str:
    if isinstance(plan, ClusterPlan):
        from mmm.launch.job.table import table

        return table(plan, explain=args.explain)
    from mmm.launch.job.preloads import preloads

    text = local.describe(plan, [p.module for p in preloads(plan.target)] if plan.fork else [])
    if options.stage is not None:
        text += f"\nstage    {options.stage}"
    found = scheduler.detect(os.environ, args.scheduler)
    return f"machine  this host: {found.why['scheduler']}, no --hosts, no --hostfile\n{text}" if args.explain else text


def announce(plan: ClusterPlan) -> None:
    """Say what was found, where that is more than this host."""
    if plan.launcher != "direct":
        from mmm.launch.job.table import table

        print(table(plan), file=sys.stderr, flush=True)


def start(plan: ClusterPlan | LaunchPlan, limits: walltime.Limits, start_timeout: float, attempt: int) -> RunControl:
    """What will run the plan."""
    if isinstance(plan, ClusterPlan):
        from mmm.launch.control.controller import Controller

        if attempt == 0:
            announce(plan)
        return Controller(plan, limits, start_timeout)
    from mmm.launch.control.supervisor import Supervisor

    return Supervisor(plan, limits)
