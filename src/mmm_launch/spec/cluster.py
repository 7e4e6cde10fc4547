"""The spec for ranks on the hosts of a job, or of a list: who starts them, how many, bound to what, and why.

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
from mmm_launch.spec import accelerators, binding, hosts, local, mpi, placement, scheduler, slurm, variables
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.hosts import Hosts, Job
from mmm_launch.spec.launch_spec import LaunchSpec, Value
from mmm_launch.spec.options import LaunchOptions, check_spare_hosts


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> LaunchSpec | None:
    """The spec of `target` on the job's hosts, or None where there are none: then this host is all there is.

    `found`, `build` and `version` stand in for this host's accelerators, its torch, and what mpiexec --version prints.
    Raises `LaunchError`.
    """
    local.refuse_inside_a_rank(environ)
    job = scheduler.detect(environ, options.scheduler)
    listed, listed_why = listed_hosts(options, job)
    if not listed:
        return None
    site, site_why = machines.find(environ, options.site)
    launcher, program = launcher_of(options, job, site, environ, version)
    if not any(map(hosts.is_here, listed)):
        found = None
    elif found is None:
        found = accelerators.find(environ=environ, build=build)
    device = device_of(options, site, environ, found)
    devices = devices_of(device.value, site, job, found)
    placed = placement.place(options, job, listed, devices.value, devices.source)
    check_spare_hosts(options.spare, placed.hosts, job.hosts)
    if options.places:
        counts = tuple(len(places) for places in options.places.values())
        placed = replace(placed, hosts=tuple(options.places), counts=counts, why="what is left (--elastic)", notes=())
    bind = bind_of(options, site)
    device_order: list[int] = []
    if site.device_variable and site.device == device.value and site.device_variable not in options.env:
        device_order = site.device_order
    settings = variables.of_site(site, options, environ)
    told = {name: variable.value for name, variable in settings.items()}
    shared = variables.of_cluster(options, site, job, placed.hosts, sum(placed.counts), device, environ, build)
    shared |= settings
    if site.name:
        record = {"name": site.name, "set": told, "device_order": device_order}
        shared[SITE_VARIABLE] = Value(json.dumps(record), "launch")
    request = mpi.Request(
        hosts=placed.hosts,
        hostfile=hostfile_of(options, job, placed.hosts, listed),
        subset=placed.hosts != job.hosts,
        env=options.env,
        environ=environ,
        more=options.launcher_args,
    )
    if launcher.value == "srun":
        command = slurm.line(request, site.srun_arguments())
    else:
        command = mpi.line(launcher.value, program, request)
    return LaunchSpec(
        target=target,
        launcher=launcher,
        command=[*command, *agent(target)],
        job=job,
        machine=Value(site, site_why),
        hosts=Value(placed.hosts, listed_why),
        counts=Value(placed.counts, placed.why),
        bind=bind,
        accelerators=Value(f"{devices.value or 'none'} a host", devices.source),
        settings=told,
        device_order=device_order,
        shared=shared,
        environ=dict(options.env),
        device=device,
        threads=variables.threads(options, job, environ),
        prefork=options.prefork,
        stage=options.stage,
        notes=(*job.notes, *placed.notes),
        elastic=options.elastic,
        places=tuple(options.places.values()),
    )


def listed_hosts(options: LaunchOptions, job: Job) -> tuple[Hosts, str]:
    """The hosts to use with their slots, and why; none where ranks run on this host alone. Raises `LaunchError`."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(f"--hosts {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    if options.hosts is not None:
        listed, why = hosts.parse_list(options.hosts), "--hosts"
    elif options.hostfile is not None:
        listed, why = hosts.parse_file(options.hostfile), f"--hostfile {options.hostfile}"
    else:
        names = [name for name in job.hosts if name not in options.spare]
        return dict.fromkeys(names, 0), job.why.get("hosts", "")
    short = {hosts.host_key(name) for name in job.hosts}
    strange = [name for name in listed if hosts.host_key(name) not in short]
    if job.hosts and strange:
        raise LaunchError(
            f"{why}: {', '.join(strange)}: not among the hosts of {job.scheduler} job {job.job_id}.\n"
            "  Name hosts of the job, or leave it out of account: --scheduler none"
        )
    return listed, why


def launcher_of(
    options: LaunchOptions, job: Job, site: Machine, environ: Mapping[str, str], version: str | None
) -> tuple[Value[str], str]:
    """The kind of what starts the processes, and why; and its program. Raises `LaunchError`."""
    if job.scheduler == "slurm" and options.mpiexec is None:
        return Value("srun", "inside a Slurm job"), "srun"
    mpiexec = "mpiexec"
    if version is None or options.mpiexec:
        mpiexec = mpi.find(options.mpiexec, environ)
    if options.mpi is not None:
        return Value(options.mpi, "--mpi"), mpiexec
    kind, words = mpi.flavour(mpiexec) if version is None else mpi.read_version(version)
    if kind is not None:
        return Value(kind, f"{mpiexec} --version: {words}"), mpiexec
    if site.mpi is not None:
        return Value(site.mpi, f"{site.name}'s; {mpiexec} --version does not say ({words})"), mpiexec
    raise LaunchError(
        f"{mpiexec} --version prints {words!r}, which is no MPI that launch knows.\n"
        f"  Say what it is like: --mpi {'|'.join(mpi.FLAVOURS)}"
    )


def hostfile_of(options: LaunchOptions, job: Job, used: tuple[str, ...], listed: Hosts) -> str | None:
    """A file that has exactly the hosts `used`, each once."""
    if options.places:
        return None
    if options.hostfile is not None and len(used) == len(listed) and not any(listed.values()):
        return options.hostfile
    return job.hostfile if used == job.hosts else None


def agent(target: Target) -> list[str]:
    """What is started on each host: the agent, and python's words for the target, or `--exec` and a program."""
    words = ["--exec", *target.command]
    if target.is_python:
        words = [*target.flags, *target.tail()]
    return [sys.executable, "-m", "mmm_launch.host.agent", *words]


def device_of(
    options: LaunchOptions, site: Machine, environ: Mapping[str, str], found: Accelerators | None
) -> Value[str | None]:
    """The device type. found: on this host, if it is one of them."""
    given = variables.given_device(options.device, environ)
    if given is not None:
        return given
    if site.device:
        return Value(site.device, site.name)
    if found is not None and found.device:
        return Value(found.device, f"found {found.why} on this host")
    return Value(None, "not known here: each rank looks on its host")


def devices_of(device: str | None, site: Machine, job: Job, found: Accelerators | None) -> Value[int | None]:
    """Devices a host; None where nothing says."""
    if device == "cpu":
        return Value(None, "CPU was chosen")
    if site.ranks_per_host and site.device in ("", device):
        return Value(site.ranks_per_host, site.name)
    if job.gpus_per_host:
        return Value(job.gpus_per_host, job.why["gpus_per_host"])
    if found is None:
        return Value(None, "this host is none of them")
    if found.count and device == found.device:
        return Value(found.count, f"{found.why} on this host")
    return Value(None, found.why)


def bind_of(options: LaunchOptions, site: Machine) -> Value[str | None]:
    """How launch binds ranks to CPUs. Raises `LaunchError`."""
    if options.cpu_bind is not None:
        binding.check(options.cpu_bind)
        return Value(options.cpu_bind, "--cpu-bind")
    return Value(site.bind, site.name if site.bind else "not asked for")
