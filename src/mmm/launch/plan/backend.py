"""What starts the processes on the hosts of a job: srun, an mpiexec, or launch itself; and its command lines."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmm.errors import LaunchError
from mmm.launch.plan import elastic, hosts, mpi, placement, slurm
from mmm.launch.plan.job import Job
from mmm.launch.plan.mpi import Request
from mmm.launch.plan.options import LaunchOptions
from mmm.launch.program.target import Target
from mmm.machines.machine import Machine


@dataclass(frozen=True)
class Backend:
    """What starts the processes. kind: as of `LaunchPlan.launcher`. program: mpiexec, srun; "" of "direct"."""

    kind: str
    program: str
    site: Machine

    def line(self, request: Request, by_host: bool) -> list[str]:
        """The command line, up to what it starts. by_host: a process a host."""
        if self.kind == "direct":
            return []
        if self.kind != "srun":
            return mpi.line(self.kind, self.program, request)
        if words := self.site.srun_by_host if by_host else self.site.srun:
            return slurm.line(request, self.site.fill(words, max(request.counts)))
        cpus = slurm.cpus_of_a_node(request.environ) if by_host else request.environ.get("SLURM_CPUS_PER_TASK")
        words = [f"--ntasks-per-node={max(request.counts)}", *([f"--cpus-per-task={cpus}"] if cpus else [])]
        return slurm.line(request, words)


def choose_backend(
    options: LaunchOptions,
    job: Job,
    site: Machine,
    listed: hosts.Hosts,
    environ: Mapping[str, str],
    version: str | None,
) -> tuple[Backend, str]:
    """What starts the processes, and why."""
    alone = options.mpiexec is None and all(map(hosts.is_here, [*listed, *options.spare]))
    if alone and options.elastic is not None:
        return Backend("direct", "", site), "launch itself: all ranks are on this host"
    kind, program, why = _launcher(options, job, site, environ, version)
    return Backend(kind, program, site), why


def _launcher(
    options: LaunchOptions, job: Job, site: Machine, environ: Mapping[str, str], version: str | None
) -> tuple[str, str, str]:
    """The launcher backend: its kind, its program, and why."""
    if job.scheduler == "slurm" and options.mpiexec is None:
        return "srun", "srun", "inside a Slurm job"
    mpiexec = "mpiexec" if version is not None and not options.mpiexec else mpi.find(options.mpiexec, environ)
    if options.mpi is not None:
        return options.mpi, mpiexec, "--mpi"
    kind, words = mpi.flavour(mpiexec) if version is None else mpi.read_version(version)
    if kind is not None:
        return kind, mpiexec, f"{mpiexec} --version: {words}"
    if site.mpi is not None:
        return site.mpi, mpiexec, f"{site.name}'s; {mpiexec} --version does not say ({words})"
    raise LaunchError(
        f"{mpiexec} --version prints {words!r}, which is no MPI that launch knows.\n"
        f"  Say what it is like: --mpi {'|'.join(mpi.FLAVOURS)}"
    )


def request_of(
    options: LaunchOptions,
    job: Job,
    placed: placement.Placement,
    listed: hosts.Hosts,
    bind: list[str],
    environ: Mapping[str, str],
) -> Request:
    """What the launcher backend is asked for. bind: its words for binding."""
    all_of_job = placed.hosts == job.hosts
    all_listed = len(placed.hosts) == len(listed) and not any(listed.values())
    return Request(
        counts=(1,) * len(placed.hosts) if options.by == "host" else placed.counts,
        hosts=placed.hosts,
        hostfile=(options.hostfile if all_listed else None) or (job.hostfile if all_of_job else None),
        subset=not all_of_job,
        bind=bind,
        env=options.env,
        environ=environ,
        more=options.launcher_args,
    )


def each_host(
    target: Target, options: LaunchOptions, backend: Backend, request: Request, job: Job
) -> dict[str, list[str]]:
    """`LaunchPlan.agent_commands`. Raises `LaunchError`: the spare hosts cannot be used."""
    elastic.check_hosts(options.spare, request.hosts, job.hosts)
    one = replace(request, counts=(1,), hostfile=None, subset=True)
    names = (*request.hosts, *options.spare)
    return {name: [*backend.line(replace(one, hosts=[name]), True), *agent(target)] for name in names}


def agent(target: Target) -> list[str]:
    """What the launcher backend starts: the agent, and python's words for the target, or `--exec` and a program."""
    words = [*target.flags, *target.tail()] if target.is_python else ["--exec", *target.command]
    return [sys.executable, "-m", "mmm.launch.host.agent", *words]
