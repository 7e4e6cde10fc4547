"""The spec of a run: on which hosts, who starts the ranks, how many, bound to what, and why.

In this order, each stated in its `Value`:

    hosts           --hosts, --hostfile; Slurm's job; PBS's job; else this host alone, whose ranks launch itself starts
    ranks a host    `mmm_launch.spec.placement`; accelerators: the site's, GPUs the job has, those of this host, if it
                    is one of them
    device          --device; MMM_DEVICE; the site; what is found here; else each rank looks
    MASTER_ADDR     MASTER_ADDR; 127.0.0.1 on one host; the first host, with the site's suffix
    MASTER_PORT     MASTER_PORT; the site; one that is free here, or another where rank 0's host says that it is taken
"""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmm_launch.contract import DEVICE_VARIABLE, SITE_VARIABLE, place_of_rank
from mmm_launch.errors import LaunchError
from mmm_launch.machines import find as machines
from mmm_launch.machines.machine import Machine
from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, binding, hosts, mpi, placement, scheduler, slurm, stage
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.host_spec import THREADS
from mmm_launch.spec.hosts import Hosts, Job
from mmm_launch.spec.launch_spec import LOCAL, LaunchSpec, Value
from mmm_launch.spec.options import LaunchOptions

# Ranks on this host only, where it has no accelerator.
CPU_RANKS = 4
ONLY_ON_HOSTS = ("mpiexec", "mpi", "launcher_args", "site", "spare_hosts", "stage")


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> LaunchSpec:
    """Plan `target` on the job's hosts, or on this one where there are none. Raises `LaunchError`.

    Args:
        found, build, version: stand in for this host's accelerators, its torch, and what mpiexec --version prints.
    """
    refuse_inside_a_rank(environ)
    build = build or accelerators.torch_build()
    job = scheduler.detect(environ, options.scheduler)
    listed, listed_why = listed_hosts(options, job)
    is_local = not listed
    site, site_why = Machine(""), ""
    launcher, program = Value(LOCAL, "all ranks are on this host"), ""
    if is_local:
        check_local(options)
        listed, listed_why = {socket.gethostname(): 0}, "no --hosts, no --hostfile"
    else:
        site, site_why = machines.find(environ, options.site)
        launcher, program = launcher_of(options, job, site, environ, version)
    if not any(map(hosts.is_here, listed)):
        found = None
    elif found is None:
        found = accelerators.find(environ=environ, build=build)

    device = device_of(options, site, environ, found)
    devices = devices_of(device.value, site, job, found)
    on_cpu = is_local and device.value in (None, "cpu")
    placed = placement.place(options, job, listed, devices, otherwise=CPU_RANKS if on_cpu else 1)
    if is_local and device.value is None and (options.nproc or options.ppn) is None:
        device = Value("cpu", "no accelerator found")
    check_spare_hosts(options.spare_hosts, placed.hosts, job)
    if options.places:
        counts = tuple(len(places) for places in options.places.values())
        placed = replace(placed, hosts=tuple(options.places), counts=counts, why="what is left (--elastic)", notes=())
    device_order: list[int] = []
    if site.device_variable and site.device == device.value and site.device_variable not in options.env:
        device_order = site.device_order

    settings = settings_of(site, options, environ)
    threads = threads_of(options, job, environ)
    shared = {
        "WORLD_SIZE": Value(str(sum(placed.counts)), "launch"),
        "MASTER_ADDR": address_of(environ, site, placed.hosts, is_local),
        "MASTER_PORT": port_for(environ, site, placed.hosts, options.attempt),
    }
    if device.value:
        shared[DEVICE_VARIABLE] = Value(device.value, device.source)
    if build in ("cuda", "hip"):
        why = "asking for devices must not open one before the fork"
        shared["PYTORCH_NVML_BASED_CUDA_CHECK"] = Value(environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1"), why)
    if threads.value:
        shared[THREADS] = Value(threads.value, threads.source)
    shared |= settings
    if site.name:
        told = {name: setting.value for name, setting in settings.items()}
        record = {"name": site.name, "set": told, "device_order": device_order}
        shared[SITE_VARIABLE] = Value(json.dumps(record), "launch")
    shared |= {name: Value(value, "--env") for name, value in options.env.items() if name != THREADS}

    command: list[str] = []
    if launcher.value == "srun":
        command = slurm.line(placed.hosts, placed.hosts != job.hosts, environ, site.srun_arguments())
    elif not is_local:
        hostfile = job.hostfile if placed.hosts == job.hosts else None
        if options.hostfile is not None and placed.hosts == tuple(listed) and not any(listed.values()):
            hostfile = options.hostfile
        command = mpi.line(launcher.value, program, placed.hosts, hostfile, options.env, environ)
    words = target.tail() if target.is_python else ["--exec", *target.command]
    command += [*options.launcher_args, sys.executable, "-m", "mmm_launch.host.agent", *target.flags, *words]

    return LaunchSpec(
        target=target,
        launcher=launcher,
        command=command,
        job=job,
        machine=Value(site, site_why),
        hosts=Value(placed.hosts, listed_why),
        counts=Value(placed.counts, placed.why),
        bind=bind_of(options, site),
        device_order=device_order,
        shared=shared,
        environ=options.env,
        device=device,
        threads=threads,
        prefork=not options.no_prefork,
        stage=options.archive or stage.of_options(options.stage, options.stage_to),
        notes=(*job.notes, *placed.notes),
        elastic=options.elastic,
        spare=tuple(options.spare_hosts),
        places=tuple(options.places.values()),
    )


def refuse_inside_a_rank(environ: Mapping[str, str]) -> None:
    """Raise `LaunchError` where some launcher has started this process as one of its ranks."""
    name = place_of_rank(environ)
    if name is not None:
        raise LaunchError(
            f"already a rank ({name}={environ[name]} in the environment): each rank would start ranks of its own.\n"
            f"  Start one launch, not one a rank. If this process is no rank: unset {name}"
        )


def check_local(options: LaunchOptions) -> None:
    """Raise `LaunchError` for an option that only ranks on hosts have."""
    for name in ONLY_ON_HOSTS:
        if getattr(options, name):
            raise LaunchError(
                f"--{name.replace('_', '-')}: ranks on this host alone are started by launch itself. Name the hosts "
                "(--hosts, --hostfile), or start inside a PBS or Slurm job."
            )


def listed_hosts(options: LaunchOptions, job: Job) -> tuple[Hosts, str]:
    """The hosts to use with their slots, and why; none where ranks run on this host alone. Raises `LaunchError`."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(f"--hosts {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    if options.hosts is not None:
        listed = hosts.parse_list(options.hosts)
        why = "--hosts"
    elif options.hostfile is not None:
        listed = hosts.parse_file(options.hostfile)
        why = f"--hostfile {options.hostfile}"
    else:
        names = [name for name in job.hosts if name not in options.spare_hosts]
        return dict.fromkeys(names, 0), job.why.get("hosts", "")
    check_of_job(listed, job, why)
    return listed, why


def check_of_job(names: Sequence[str] | Hosts, job: Job, why: str) -> None:
    """Raise `LaunchError` where hosts are not among those of the job, if there is one."""
    own = {hosts.host_key(name) for name in job.hosts}
    strange = [name for name in names if hosts.host_key(name) not in own]
    if own and strange:
        raise LaunchError(
            f"{why}: {', '.join(strange)}: not among the hosts of {job.scheduler} job {job.job_id}.\n"
            "  Name hosts of the job, or leave it out of account: --scheduler none"
        )


def check_spare_hosts(spare: Sequence[str], used: Sequence[str], job: Job) -> None:
    """Raise `LaunchError` where --spare-hosts are none."""
    check_of_job(spare, job, "--spare-hosts")
    for name in spare:
        if name in used:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is to have ranks from the beginning.")


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
    if version is None:
        version = mpi.version_of(mpiexec)
    kind, line = mpi.read_version(version)
    if kind is not None:
        return Value(kind, f"{mpiexec} --version: {line}"), mpiexec
    if site.mpi is not None:
        return Value(site.mpi, f"{site.name}'s; {mpiexec} --version does not say ({line})"), mpiexec
    raise LaunchError(
        f"{mpiexec} --version prints {line!r}, which is no MPI that launch knows.\n"
        f"  Say what it is like: --mpi {'|'.join(mpi.FLAVOURS)}"
    )


def device_of(
    options: LaunchOptions, site: Machine, environ: Mapping[str, str], found: Accelerators | None
) -> Value[str | None]:
    """The device type. found: on this host, if it is one of them."""
    if options.device:
        return Value(options.device, "--device")
    if environ.get(DEVICE_VARIABLE):
        return Value(environ[DEVICE_VARIABLE], "set in the environment")
    if site.device:
        return Value(site.device, site.name)
    if found is not None and found.device:
        return Value(found.device, f"found {found.why} on this host")
    return Value(None, "not known here: each rank looks on its host")


def devices_of(device: str | None, site: Machine, job: Job, found: Accelerators | None) -> Value[int | None]:
    """Devices a host; None where nothing says."""
    if device == "cpu":
        return Value(None, "CPU was chosen")
    if device == "mps":
        return Value(1, "mps is one device")
    if site.ranks_per_host and site.device in ("", device):
        return Value(site.ranks_per_host, site.name)
    if job.gpus_per_host:
        return Value(job.gpus_per_host, job.why["gpus_per_host"])
    if found is None:
        return Value(None, "this host is none of them")
    if found.count and device == found.device:
        return Value(found.count, f"{found.why} on this host")
    return Value(None, f"no {device or 'accelerator'} found ({found.why})")


def bind_of(options: LaunchOptions, site: Machine) -> Value[str | None]:
    """How launch binds ranks to CPUs. Raises `LaunchError`."""
    if options.cpu_bind is not None:
        binding.check(options.cpu_bind)
        return Value(options.cpu_bind, "--cpu-bind")
    return Value(site.bind, site.name if site.bind else "not asked for")


def settings_of(site: Machine, options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, Value[str]]:
    """The site's variables that the user has not set."""
    settings = {}
    for name, (value, source) in site.variables().items():
        if name not in environ and name not in options.env:
            settings[name] = Value(value, source)
    return settings


def threads_of(options: LaunchOptions, job: Job, environ: Mapping[str, str]) -> Value[str | None]:
    """OMP_NUM_THREADS where it is given. A text that is no number above 0 is as if it were not set."""
    source = "set in the environment"
    text = environ.get(THREADS, "")
    if THREADS in options.env:
        source = "--env"
        text = options.env[THREADS]
    elif job.scheduler == "pbs" and text:
        return Value(None, f"cores of the rank; the {text} in the environment is PBS's, of the job's first chunk")
    # Several numbers: OpenMP reads one for each level of nested parallel regions.
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return Value(text, source)
    return Value(None, "cores of the rank, counted on its host")


def address_of(environ: Mapping[str, str], site: Machine, used: Sequence[str], is_local: bool) -> Value[str]:
    """Where rank 0 listens."""
    if environ.get("MASTER_ADDR") and not is_local:
        return Value(environ["MASTER_ADDR"], "set in the environment")
    if len(used) == 1:
        return Value("127.0.0.1", "all ranks are on one host")
    suffix = site.host_suffix
    if not suffix:
        return Value(used[0], "the first host")
    name = used[0] if used[0].endswith(suffix) else used[0].partition(".")[0] + suffix
    return Value(name, f"the first host, with {site.name}'s suffix")


def port_for(environ: Mapping[str, str], site: Machine, used: Sequence[str], attempt: int) -> Value[str]:
    """The port at which rank 0 listens. Raises `LaunchError`."""
    port = environ.get("MASTER_PORT")
    if port:
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise LaunchError(
                f"MASTER_PORT={port} in the environment is not a port. Without MASTER_PORT one is picked."
            )
        return Value(port, "set in the environment")
    if site.port:
        return Value(str(site.port + attempt), site.name)
    return Value(str(hosts.free_port()), "a free port here, or another where it is taken", not hosts.is_here(used[0]))
