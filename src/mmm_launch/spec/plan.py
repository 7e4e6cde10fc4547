"""Plans a run: on which hosts, who starts the ranks, how many, bound to which CPUs, and why.

Each value is looked for in these places, in this order. Its `Value` says in which one it was found:

    hosts           --hosts, --hostfile; the job of Flux, Slurm or PBS; else only this host: launch starts the ranks
    ranks a host    `mmm_launch.spec.placement`. It counts accelerators: those of the known machine, those of the job,
                    and those of this host, if it is one of the hosts
    device          --device; MMM_DEVICE; the known machine; what is found on this host; else each rank looks
    MASTER_ADDR     MASTER_ADDR; 127.0.0.1 on one host; the first host, with the known machine's suffix
    MASTER_PORT     MASTER_PORT; the known machine's; a port that is free here, or one that rank 0's host picks
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
from mmm_launch.spec import accelerators, binding, flux, hosts, mpi, placement, scheduler, slurm, stage
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
    local: Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> LaunchSpec:
    """Plan how to start `target` on the hosts of the job, or on this host without a job.

    Args:
        target: what each rank runs.
        options: the command line.
        environ: launch's environment.
        local: the accelerators of this host. Default: launch looks for them.
        build: what the installed torch was built for. Default: launch reads it from torch's files.
        version: what `mpiexec --version` prints. Default: launch runs it.

    Raises:
        LaunchError: the ranks cannot be started as asked.
    """
    refuse_inside_a_rank(environ)
    build = build or accelerators.torch_build()
    job = scheduler.detect(environ, options.scheduler)
    listed, listed_why = listed_hosts(options, job)
    is_local = not listed
    if is_local:
        check_local(options)
        listed = {socket.gethostname(): 0}
        listed_why = "no --hosts, no --hostfile"
        site = Machine("")
        site_why = ""
        launcher = Value(LOCAL, "all ranks are on this host")
        program = ""
    else:
        site, site_why = machines.find(environ, options.site)
        launcher, program = launcher_of(options, job, site, environ, version)
    # launch may run on a login node, whose accelerators say nothing about the job's hosts.
    if not any(map(hosts.is_here, listed)):
        local = None
    elif local is None:
        local = accelerators.find(environ=environ, build=build)

    device = device_of(options, site, environ, local)
    devices = devices_of(device.value, site, job, local)
    ranks_otherwise = 1
    if is_local and device.value in (None, "cpu"):
        ranks_otherwise = CPU_RANKS
    placed = placement.place(options, job, listed, devices, ranks_otherwise)
    if is_local and device.value is None and (options.nproc or options.ppn) is None:
        device = Value("cpu", "no accelerator found")
    check_spare_hosts(options.spare_hosts, placed.hosts, job)
    spare = tuple(options.spare_hosts)
    # Hosts that the job has and the run does not use, as with -N.
    if not spare and (options.retries or options.elastic):
        spare = tuple(name for name in listed if name not in placed.hosts)
    # A later attempt: only the places that have not failed.
    if options.places:
        placed = replace(
            placed,
            hosts=tuple(options.places),
            counts=tuple(len(places) for places in options.places.values()),
            why="what is left",
            notes=(),
        )
    # On some machines device 0 is not the one next to local rank 0's CPUs. A user's --env decides instead.
    device_order: list[int] = []
    if site.device_variable and site.device == device.value and site.device_variable not in options.env:
        device_order = site.device_order

    settings = settings_of(site, options, environ)
    threads = threads_of(options, job, environ)
    # The variables of every rank. RANK, LOCAL_RANK and the like are added on each host.
    shared = {
        "WORLD_SIZE": Value(str(sum(placed.counts)), "launch"),
        "MASTER_ADDR": address_of(environ, site, placed.hosts, is_local),
        "MASTER_PORT": port_for(environ, site, placed.hosts, options.attempt),
    }
    if device.value:
        shared[DEVICE_VARIABLE] = Value(device.value, device.source)
    if build in ("cuda", "hip"):
        # With it torch.cuda.is_available() asks NVML. CUDA itself cannot be used in a forked process after it was
        # initialised before the fork.
        why = "asking for devices must not open one before the fork"
        shared["PYTORCH_NVML_BASED_CUDA_CHECK"] = Value(environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1"), why)
    if threads.value:
        shared[THREADS] = Value(threads.value, threads.source)
    shared |= settings
    if site.name:
        # mmm writes this into the run's record.
        record = {
            "name": site.name,
            "set": {name: setting.value for name, setting in settings.items()},
            "device_order": device_order,
        }
        shared[SITE_VARIABLE] = Value(json.dumps(record), "launch")
    # --env comes last: what the user has typed replaces everything above.
    for name, value in options.env.items():
        if name != THREADS:
            shared[name] = Value(value, "--env")

    command: list[str] = []
    if launcher.value == "srun":
        command = slurm.line(placed.hosts, placed.hosts != job.hosts, environ, site.srun_arguments())
    elif launcher.value == "flux":
        command = flux.line(placed.hosts, placed.hosts != job.hosts)
    elif not is_local:
        # mpiexec gets a host file only where it names exactly the hosts in use, each once: one agent runs on each.
        hostfile = None
        if placed.hosts == job.hosts:
            hostfile = job.hostfile
        if options.hostfile is not None and placed.hosts == tuple(listed) and not any(listed.values()):
            hostfile = options.hostfile
        command = mpi.line(launcher.value, program, placed.hosts, hostfile, options.env, environ)
    # mpiexec or srun starts one agent on each host. The agent starts the ranks.
    command += [*options.launcher_args, sys.executable, "-m", "mmm_launch.host.agent", *target.flags]
    if target.is_python:
        command += target.tail()
    else:
        command += ["--exec", *target.command]

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
        spare=spare,
        places=tuple(options.places.values()),
    )


def refuse_inside_a_rank(environ: Mapping[str, str]) -> None:
    """Raise `LaunchError` if a launcher, such as mpiexec or torchrun, has started this process as a rank."""
    name = place_of_rank(environ)
    if name is not None:
        raise LaunchError(
            f"already a rank ({name}={environ[name]} in the environment): each rank would start ranks of its own.\n"
            f"  Start launch once, not once per rank. If this process is not a rank: unset {name}"
        )


def check_local(options: LaunchOptions) -> None:
    """Raise `LaunchError` for an option that has no meaning for ranks on this host only."""
    for name in ONLY_ON_HOSTS:
        if getattr(options, name):
            raise LaunchError(
                f"--{name.replace('_', '-')} is for runs on named hosts; launch itself starts ranks on this host. Name "
                "hosts (--hosts, --hostfile), or start launch inside a PBS, Slurm or Flux job."
            )


def listed_hosts(options: LaunchOptions, job: Job) -> tuple[Hosts, str]:
    """Return the hosts to use with their slots, and why these. Empty: ranks run on this host only.

    Raises:
        LaunchError: the list cannot be read, or a host is not one of the job's.
    """
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
    """Raise `LaunchError` if this is inside a job, and a host is not one of the job's hosts."""
    own = {hosts.host_key(name) for name in job.hosts}
    strange = [name for name in names if hosts.host_key(name) not in own]
    if own and strange:
        raise LaunchError(
            f"{why}: {', '.join(strange)}: not among the hosts of {job.scheduler} job {job.job_id}.\n"
            "  Name hosts of the job, or ignore the job: --scheduler none"
        )


def check_spare_hosts(spare: Sequence[str], used: Sequence[str], job: Job) -> None:
    """Raise `LaunchError` if a host of --spare-hosts is not in the job, or has ranks from the beginning."""
    check_of_job(spare, job, "--spare-hosts")
    for name in spare:
        if name in used:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is to have ranks from the beginning.")


def launcher_of(
    options: LaunchOptions, job: Job, site: Machine, environ: Mapping[str, str], version: str | None
) -> tuple[Value[str], str]:
    """Choose what starts one process on each host.

    Returns:
        Its kind ("srun", "flux", "hydra", "pals" or "openmpi") with the reason, and the name of its program.

    Raises:
        LaunchError: there is no mpiexec, or its kind cannot be told.
    """
    # Every Slurm installation has srun, and it knows the job's hosts without being told.
    if job.scheduler == "slurm" and options.mpiexec is None:
        return Value("srun", "inside a Slurm job"), "srun"
    if job.scheduler == "flux" and options.mpiexec is None:
        return Value("flux", "inside a Flux job"), "flux"
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
        f"{mpiexec} --version prints {line!r}, which is not an MPI that launch knows.\n"
        f"  Say what it is like: --mpi {'|'.join(mpi.FLAVOURS)}"
    )


def device_of(
    options: LaunchOptions, site: Machine, environ: Mapping[str, str], local: Accelerators | None
) -> Value[str | None]:
    """Choose the device type.

    Args:
        local: the accelerators of this host, if it is one of the run's hosts.
    """
    if options.device:
        return Value(options.device, "--device")
    if environ.get(DEVICE_VARIABLE):
        return Value(environ[DEVICE_VARIABLE], "set in the environment")
    if site.device:
        return Value(site.device, site.name)
    if local is not None and local.device:
        return Value(local.device, f"found {local.why} on this host")
    return Value(None, "not known here: each rank looks on its host")


def devices_of(device: str | None, site: Machine, job: Job, local: Accelerators | None) -> Value[int | None]:
    """Find how many devices each host has. None: nothing says it."""
    if device == "cpu":
        return Value(None, "CPU was chosen")
    if device == "mps":
        return Value(1, "mps is one device")
    if site.ranks_per_host and site.device in ("", device):
        return Value(site.ranks_per_host, site.name)
    if job.gpus_per_host:
        return Value(job.gpus_per_host, job.why["gpus_per_host"])
    if local is None:
        return Value(None, "this host is none of them")
    if local.count and device == local.device:
        return Value(local.count, f"{local.why} on this host")
    return Value(None, f"no {device or 'accelerator'} found ({local.why})")


def bind_of(options: LaunchOptions, site: Machine) -> Value[str | None]:
    """Decide how launch binds ranks to CPUs. Raises `LaunchError`."""
    if options.cpu_bind is not None:
        binding.check(options.cpu_bind)
        return Value(options.cpu_bind, "--cpu-bind")
    if site.bind:
        return Value(site.bind, site.name)
    return Value(site.bind, "not asked for")


def settings_of(site: Machine, options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, Value[str]]:
    """Return the known machine's variables that the user has not set."""
    settings = {}
    for name, (value, source) in site.variables().items():
        if name not in environ and name not in options.env:
            settings[name] = Value(value, source)
    return settings


def threads_of(options: LaunchOptions, job: Job, environ: Mapping[str, str]) -> Value[str | None]:
    """Return OMP_NUM_THREADS where the user gives it. A value that is not a number above 0 counts as not set."""
    source = "set in the environment"
    text = environ.get(THREADS, "")
    if THREADS in options.env:
        source = "--env"
        text = options.env[THREADS]
    # PBS sets it to the cores of the job's first chunk, which is right for one rank a chunk only.
    elif job.scheduler == "pbs" and text:
        return Value(None, f"cores of the rank; the {text} in the environment is PBS's, of the job's first chunk")
    # Several numbers: OpenMP reads one for each level of nested parallel regions.
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return Value(text, source)
    return Value(None, "cores of the rank, counted on its host")


def address_of(environ: Mapping[str, str], site: Machine, used: Sequence[str], is_local: bool) -> Value[str]:
    """Choose the address at which rank 0 listens."""
    if environ.get("MASTER_ADDR") and not is_local:
        return Value(environ["MASTER_ADDR"], "set in the environment")
    if len(used) == 1:
        return Value("127.0.0.1", "all ranks are on one host")
    suffix = site.host_suffix
    if not suffix:
        return Value(used[0], "the first host")
    # The suffix makes the name an address on the fast network: x1000c0s0b0n0 → x1000c0s0b0n0-hsn0.
    name = used[0]
    if not name.endswith(suffix):
        name = name.partition(".")[0] + suffix
    return Value(name, f"the first host, with {site.name}'s suffix")


def port_for(environ: Mapping[str, str], site: Machine, used: Sequence[str], attempt: int) -> Value[str]:
    """Choose the port at which rank 0 listens. Raises `LaunchError`."""
    port = environ.get("MASTER_PORT")
    if port:
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise LaunchError(
                f"MASTER_PORT={port} in the environment is not a port. Without MASTER_PORT one is picked."
            )
        return Value(port, "set in the environment")
    # The ranks of the attempt before may still hold the port: each attempt takes the next one.
    if site.port:
        return Value(str(site.port + attempt), site.name)
    # A port that is free here may be taken on the first host: then that host's agent proposes another.
    return Value(
        str(hosts.free_port()),
        "a free port here, or another where it is taken",
        is_wish=not hosts.is_here(used[0]),
    )
