"""The plan for ranks on the hosts of a job, or of a list: who starts them, how many, bound to what, and why.

In this order, each stated in its `Value`:

    hosts           --hosts, --hostfile; Slurm's job; PBS's job; else this is no cluster and `local` plans
    ranks a host    `mmm_launch.spec.placement`; accelerators: the site's, GPUs the job has, those of this host, if it
                    is one of them
    device          --device; MMM_DEVICE; the site; what is found here; else each rank looks
    MASTER_ADDR     MASTER_ADDR; 127.0.0.1 on one host; the first host, with the site's suffix
    MASTER_PORT     MASTER_PORT; the site; a free one, if the first host is this one; from the job's identity, or a
                    free one where rank 0's host says that it is taken
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from mmm_launch.contract import SITE_VARIABLE
from mmm_launch.errors import LaunchError
from mmm_launch.machines import find as machines
from mmm_launch.machines.machine import Machine
from mmm_launch.program.target import Target
from mmm_launch.spec import (
    accelerators,
    binding,
    hosts,
    local,
    mpi,
    placement,
    scheduler,
    slurm,
    variables,
)
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.hosts import Job
from mmm_launch.spec.launch_spec import LaunchSpec, Value
from mmm_launch.spec.mpi import Request
from mmm_launch.spec.options import LaunchOptions, check_spare_hosts


def backend_line(kind: str, program: str, site: Machine, request: Request, by_host: bool) -> list[str]:
    """The launcher backend's command line, up to what it starts.

    Args:
        kind: as of `LaunchSpec.launcher`. program: mpiexec or srun. by_host: a process a host.
    """
    if kind != "srun":
        return mpi.line(kind, program, request)
    words = site.srun_by_host if by_host else site.srun
    if words:
        return slurm.line(request, site.fill(words, request.per_host))
    cpus = slurm.cpus_of_a_node(request.environ) if by_host else request.environ.get("SLURM_CPUS_PER_TASK")
    words = [f"--ntasks-per-node={request.per_host}"]
    if cpus:
        words.append(f"--cpus-per-task={cpus}")
    return slurm.line(request, words)


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
    hostfile = (options.hostfile if all_listed else None) or (job.hostfile if all_of_job else None)
    return Request(
        per_host=1 if options.by == "host" else placed.counts[0],
        hosts=placed.hosts,
        hostfile=None if options.places else hostfile,
        subset=not all_of_job,
        bind=bind,
        env=options.env,
        environ=environ,
        more=options.launcher_args,
    )


def agent(target: Target) -> list[str]:
    """What the launcher backend starts: the agent, and python's words for the target, or `--exec` and a program."""
    words = [*target.flags, *target.tail()] if target.is_python else ["--exec", *target.command]
    return [sys.executable, "-m", "mmm_launch.host.agent", *words]


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> LaunchSpec | None:
    """Plan `target` on the job's hosts, or None where there are none: then this host is all there is.

    `found`, `build` and `version` stand in for this host's accelerators, its torch, and what mpiexec --version prints.
    Raises `LaunchError`.
    """
    local.refuse_inside_a_rank(environ)
    job, (listed, listed_why) = _hosts(options, environ)
    if not listed:
        return None
    site, site_why = machines.find(environ, options.site)
    backend, program, backend_why = _launcher(options, job, site, environ, version)
    found = (found or accelerators.find(environ=environ, build=build)) if any(map(hosts.is_here, listed)) else None
    device = _device(options, site, environ, found)
    devices = _devices(device.value, site, job, found)
    placed = placement.place(options, job, listed, None if device.value == "cpu" else devices.value, devices.source)
    check_spare_hosts(options.spare, placed.hosts, job.hosts)
    if options.places:
        counts = tuple(len(places) for places in options.places.values())
        placed = replace(placed, hosts=tuple(options.places), counts=counts, why="what is left (--elastic)", notes=())
    used, counts = placed.hosts, placed.counts
    options, by_notes = _started_by(options, counts)
    bind, words, binding_words = _binding(options, site, backend, max(counts))
    order = _device_order(site, options, backend, device.value)
    settings = variables.of_site(site, options, environ)
    shared = variables.of_cluster(options, site, job, used, sum(counts), device, environ, build) | settings
    told = {name: variable.value for name, variable in settings.items()}
    if site.name:
        record = {"name": site.name, "set": told, "device_order": order}
        shared[SITE_VARIABLE] = Value(json.dumps(record), "launch")
    request = request_of(options, job, placed, listed, words, environ)
    return LaunchSpec(
        target=target,
        launcher=Value(backend, backend_why),
        command=[*backend_line(backend, program, site, request, options.by == "host"), *agent(target)],
        job=job,
        machine=Value(site, site_why),
        hosts=Value(used, listed_why),
        counts=Value(counts, placed.why),
        by=options.by,
        bind=bind,
        binding=binding_words,
        accelerators=Value(f"{devices.value or 'none'} a host", devices.source),
        settings=told,
        device_order=order,
        shared=shared,
        environ=dict(options.env),
        device=device,
        threads=variables.threads(options, job, environ),
        prefork=options.prefork,
        stage=options.stage,
        notes=(*job.notes, *placed.notes, *by_notes),
        elastic=options.elastic,
        places=tuple(options.places.values()),
    )


def _hosts(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[Job, tuple[hosts.Hosts, str]]:
    """The job; the hosts to use with their slots, and why; none where ranks run on this host alone."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(f"--hosts {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    job = scheduler.detect(environ, options.scheduler)
    if options.hosts is not None:
        listed, why = hosts.parse_list(options.hosts), "--hosts"
    elif options.hostfile is not None:
        listed, why = hosts.parse_file(options.hostfile), f"--hostfile {options.hostfile}"
    else:
        names = [name for name in job.hosts if name not in options.spare]
        return job, (dict.fromkeys(names, 0), job.why.get("hosts", ""))
    short = {hosts.host_key(name) for name in job.hosts}
    strange = [name for name in listed if hosts.host_key(name) not in short] if job.hosts else []
    if strange:
        raise LaunchError(
            f"{why}: {', '.join(strange)}: not among the hosts of {job.scheduler} job {job.job_id}.\n"
            "  Name hosts of the job, or leave it out of account: --scheduler none"
        )
    return job, (listed, why)


def _started_by(options: LaunchOptions, counts: tuple[int, ...]) -> tuple[LaunchOptions, tuple[str, ...]]:
    """The options, with a process a host where hosts have different numbers of ranks; and what is to be said."""
    if options.by == "host" or len(set(counts)) == 1:
        return options, ()
    note = "hosts have different numbers of ranks: one process a host is started, which forks its ranks"
    return replace(options, by="host"), (note,)


def _device_order(site: Machine, options: LaunchOptions, backend: str, device: str | None) -> list[int]:
    """The site's devices for local rank 0, 1, …; none where each rank sees all of them, or its own alone."""
    shown = site.shows_devices(options.by, backend, device) and site.device_variable not in options.env
    return site.device_order if shown else []


def _device(
    options: LaunchOptions, site: Machine, environ: Mapping[str, str], found: Accelerators | None
) -> Value[str | None]:
    """The device type. `found`: on this host, if it is one of them."""
    if given := variables.given_device(options.device, environ):
        return given
    if site.device:
        return Value(site.device, site.name)
    if found is not None and found.device:
        return Value(found.device, f"found {found.why} on this host")
    return Value(None, "not known here: each rank looks on its host")


def _devices(device: str | None, site: Machine, job: Job, found: Accelerators | None) -> Value[int | None]:
    """Devices a host, None where nothing says."""
    if device == "cpu":
        return Value(0, "CPU was chosen")
    if site.ranks_per_host and site.device in ("", device):
        return Value(site.ranks_per_host, site.name)
    if job.gpus_per_host:
        return Value(job.gpus_per_host, job.why["gpus_per_host"])
    if found is None:
        return Value(None, "this host is none of them")
    if found.count and device == found.device:
        return Value(found.count, f"{found.why} on this host")
    return Value(None, found.why)


def _binding(
    options: LaunchOptions, site: Machine, launcher: str, per_host: int
) -> tuple[str | None, list[str], Value[str]]:
    """launch's own binding, or None; the launcher backend's words for it; both in words."""
    if options.by == "host" or launcher in ("hydra", "openmpi"):
        bind = options.cpu_bind or site.bind
        why = "--cpu-bind" if options.cpu_bind else site.name if bind else "not asked for"
        if bind is not None:
            binding.check(bind)
        unbound = {"pals": ["--cpu-bind", "none"], "srun": ["--cpu-bind=none"]}.get(launcher, [])
        return bind, unbound, Value(f"{bind}, by launch" if bind else "none", why)
    if options.cpu_bind is not None:
        words = ["--cpu-bind", options.cpu_bind] if launcher == "pals" else [f"--cpu-bind={options.cpu_bind}"]
        return None, words, Value(f"{options.cpu_bind}, by {launcher}", "--cpu-bind")
    if launcher == "pals" and site.bind_args:
        words = site.fill(site.bind_args, per_host)
        return None, words, Value(" ".join(words), site.name)
    if launcher == "srun" and site.srun:
        return None, [], Value(f"by srun: {' '.join(site.fill(site.srun, per_host))}", site.name)
    return None, [], Value(f"left to {launcher}", "not asked for")
