"""The `launch` command."""

import argparse
import os
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from mmm.errors import LaunchError, UserError
from mmm.launch import binding, cluster, job, local, options, started, target, walltime, wire
from mmm.launch.cluster import ClusterPlan, Wishes
from mmm.launch.local import LaunchPlan
from mmm.launch.options import parser, split
from mmm.launch.run import Run
from mmm.launch.target import Target

__all__ = ["main", "parser", "split"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch` with these words (default: the command line's) and return its exit code."""
    begin = time.time()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words, begin)
    except UserError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there are ranks; later it is passed on to them
        return 130


def _main(words: list[str], begin: float) -> int:
    given, command = split(words)
    args = parser().parse_args(given)
    wishes = options.wishes(args)
    timeout = options.seconds("--timeout", args.timeout)
    start_timeout = options.seconds("--start-timeout", args.start_timeout) or 0.0
    retries = options.count("--retries", args.retries, least=0) or 0
    if not command:
        raise LaunchError("no command to launch.\n  Try: launch -n 4 python3 -m mmm.examples.fsdp_tp")
    what = target.parse(command)
    target.check(what)
    shared = {
        wire.LINE_VARIABLE: shlex.join(["launch", *words]),
        wire.ATTEMPTS_VARIABLE: uuid.uuid4().hex,
        **started.variables(os.environ, begin),
    }
    plan = plan_run(what, wishes, shared)
    for note in plan.notes:
        print(f"launch: {note}", file=sys.stderr)
    its_job = plan.job if isinstance(plan, ClusterPlan) else job.detect(os.environ, wishes.scheduler)
    limits = walltime.limits(timeout, args.signal, args.walltime, its_job, os.environ)
    if args.dry_run or args.explain:
        try:
            print(describe(plan, args), flush=True)
        except OSError:  # `| head`, a full disk: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return 0
    for attempt in range(retries + 1):
        if attempt:  # whose start-up is its own
            for told in (shared, os.environ):
                told.pop(wire.STARTED_VARIABLE, None)
            shared[wire.BEGAN_VARIABLE] = repr(time.time())
            plan = plan_run(what, replace(wishes, attempt=attempt), shared)
        plan.shared[wire.ATTEMPT_VARIABLE] = str(attempt)
        run = start(plan, limits, start_timeout, attempt)
        code = run.run()
        if code == 0 or not run.again or attempt == retries:
            return code
        left = retries - attempt
        print(f"launch: exit code {code}: starting again (--retries; {left} left)", file=sys.stderr, flush=True)
    return code


def plan_run(what: Target, wishes: Wishes, shared: dict[str, str]) -> ClusterPlan | LaunchPlan:
    """The plan for the job's hosts, or for this one where there is no job."""
    plan: ClusterPlan | LaunchPlan | None = cluster.plan(what, wishes)
    if plan is None:
        plan = plan_here(what, wishes)
    plan.shared.update(shared)
    return plan


def plan_here(what: Target, wishes: Wishes) -> LaunchPlan:
    """Ranks on this host alone. Raises `LaunchError` for options that only a cluster has."""
    only = {
        "--mpiexec": wishes.mpiexec,
        "--mpi": wishes.mpi,
        "--launcher-args": " ".join(wishes.launcher_args),
        "--ranks-by": wishes.by if wishes.by != "rank" else None,
        "--site": wishes.site,
    }
    for name, value in only.items():
        if value:
            raise LaunchError(
                f"{name} {value}: ranks on this host alone are started by launch itself. Name the hosts "
                "(--hosts, --hostfile), or start inside a PBS or Slurm job."
            )
    if wishes.nhosts not in (None, 1):
        raise LaunchError(
            f"-N {wishes.nhosts}: this is one host, in no PBS or Slurm job. Name the hosts: --hosts a,b, "
            "or --hostfile FILE."
        )
    if wishes.nproc and wishes.per_host and wishes.nproc != wishes.per_host:
        raise LaunchError(f"-n {wishes.nproc} -ppn {wishes.per_host}: on one host they are the same. Leave one out.")
    count = wishes.nproc or wishes.per_host
    if count is not None and count > options.MAX_RANKS:
        raise LaunchError(f"-n {count}: the number of ranks on a host must be from 1 to {options.MAX_RANKS}.")
    plan = local.plan(what, nproc=count, device=wishes.device, prefork=wishes.prefork)
    if wishes.cpu_bind is not None and wishes.cpu_bind != "none":
        each = [cpus or "" for cpus in binding.split(wishes.cpu_bind, len(plan.ranks))]
        for rank, cpus in zip(plan.ranks, each, strict=True):
            rank[wire.CPUS_VARIABLE] = cpus
        if not os.environ.get("OMP_NUM_THREADS") and "OMP_NUM_THREADS" not in wishes.env:
            binding.set_threads(plan.shared, plan.ranks, [len(binding.cpu_list(cpus)) for cpus in each])
            plan.why["OMP_NUM_THREADS"] = f"--cpu-bind {wishes.cpu_bind}"
    for name, value in wishes.env.items():
        plan.shared[name], plan.why[name] = value, "--env"
    return plan


def describe(plan: ClusterPlan | LaunchPlan, args: argparse.Namespace) -> str:
    if isinstance(plan, ClusterPlan):
        from mmm.launch.table import table

        return table(plan, explain=args.explain)
    from mmm.launch.imports import preloads

    text = local.describe(plan, [p.module for p in preloads(plan.target)] if plan.fork else [])
    found = job.detect(os.environ, args.scheduler)
    return f"machine  this host: {found.why['scheduler']}, no --hosts, no --hostfile\n{text}" if args.explain else text


def start(plan: ClusterPlan | LaunchPlan, limits: walltime.Limits, start_timeout: float, attempt: int) -> Run:
    """What will run the plan. Says what was found, where that is more than this host."""
    if isinstance(plan, ClusterPlan):
        from mmm.launch.head import Head
        from mmm.launch.table import table

        if attempt == 0:
            print(table(plan), file=sys.stderr, flush=True)
        return Head(plan, limits, start_timeout)
    from mmm.launch.supervise import Supervisor

    return Supervisor(plan, limits)
