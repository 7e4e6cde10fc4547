"""The plan for ranks on the hosts of a job, or of a list: who starts them, how many, bound to what, and why.

In this order, each stated in `ClusterPlan.why`:

    hosts           --hosts, --hostfile; Slurm's job; PBS's job; else this is no cluster and `local` plans
    ranks a host    -ppn; -n over the hosts; what the job asked for; slots in the host file; the site; GPUs the job has;
                    accelerators of this host, if it is one of them; 1
    device          --device; MMM_DEVICE; the site; what is found here; else each rank looks
    MASTER_ADDR     MASTER_ADDR; 127.0.0.1 on one host; the first host, with the site's suffix
    MASTER_PORT     MASTER_PORT; the site; a free one, if the first host is this one; from the job's identity
"""

import getpass
import os
import shlex
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from mmm.contract import DEVICE_VARIABLE
from mmm.errors import LaunchError
from mmm.launch.job import accelerators, binding, hosts, local, mpi, scheduler, sites, slurm
from mmm.launch.job.mpi import Request
from mmm.launch.job.options import LaunchOptions
from mmm.launch.job.scheduler import Job
from mmm.launch.job.sites import Site
from mmm.launch.job.target import Target

FIRST_PORT, PORTS = 20_000, 12_000  # below those that systems give to outgoing connections
MAX_RANKS_PER_HOST = 4096


@dataclass(frozen=True)
class ClusterPlan:
    """Everything `Controller` needs.

    Attributes:
        launcher: "srun", "hydra", "pals" or "openmpi". command: its whole command line.
        hosts: those used, in order; ranks 0 … per_host − 1 are on the first. ranks: in all.
        by: "rank": the launcher backend starts every rank; "host": one process a host, which forks that host's ranks.
        bind: how launch binds ranks itself; None: it does not. binding: in words.
        shared: variables for every rank. device_variable, device_order: as in `Site`.
        threads: OMP_NUM_THREADS; None: computed on each host, from the cores its ranks have.
        why: name of a value → where it came from.
    """

    target: Target
    launcher: str
    command: list[str]
    job: Job
    site: Site | None
    hosts: tuple[str, ...]
    per_host: int
    ranks: int
    by: str
    bind: str | None
    binding: str
    accelerators: str
    shared: dict[str, str]
    environ: dict[str, str]  # what the launcher backend itself gets on top of launch's environment
    device: str | None
    threads: int | None
    prefork: bool
    why: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        """How many the launcher backend starts."""
        return self.ranks if self.by == "rank" else len(self.hosts)


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: accelerators.Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> ClusterPlan | None:
    """Plan `target` on the job's hosts, or None where there are none: then this host is all there is.

    `found`, `build` and `version` stand in for this host's accelerators, its torch, and what mpiexec --version prints.
    Raises `LaunchError`.
    """
    local.refuse_inside_a_rank(environ)
    here = _hosts(options, environ)
    if here is None:
        return None
    its_job, listed, why, notes = here
    site, why["machine"] = sites.find(environ, options.site)
    launcher, mpiexec, why["launcher"] = _launcher(options, its_job, site, environ, version)
    device, why[DEVICE_VARIABLE], per_host_devices, why["accelerators"] = _device(
        options, site, its_job, listed, environ, found, build
    )
    default, reason = _per_host(its_job, site, listed, device, per_host_devices, why["accelerators"])
    per_host, ranks, used, why["ranks"] = _ranks(options, list(listed), default, reason)
    if per_host > MAX_RANKS_PER_HOST:
        raise LaunchError(
            f"{per_host} ranks on each host: the number of ranks on a host must be from 1 to {MAX_RANKS_PER_HOST}."
        )
    if default is None and options.nproc is None and options.per_host is None:
        notes.append("no accelerators known: 1 rank on each host (choose with -ppn or -n)")
    if len(used) < len(listed):
        notes.append(f"{len(used)} of {len(listed)} hosts are used")
    bind, words, binding_words, why["cpu binding"] = _binding(options, site, launcher, per_host)
    shared, threads = _environment(options, site, its_job, used, ranks, device, environ, build, why)

    whole = tuple(used) == tuple(its_job.hosts)
    all_listed = len(used) == len(listed) and set(listed.values()) == {1}
    hostfile = (options.hostfile if all_listed else None) or (its_job.hostfile if whole else None)
    by_host = options.by == "host"
    request = Request(
        processes=len(used) if by_host else ranks,
        per_host=1 if by_host else per_host,
        hosts=used,
        hostfile=hostfile,
        subset=not whole,
        bind=words,
        env=options.env,
        environ=environ,
        more=options.launcher_args,
    )
    command = [*_line(launcher, mpiexec, request, site, by_host), *_entry(target)]
    return ClusterPlan(
        target=target,
        launcher=launcher,
        command=command,
        job=its_job,
        site=site,
        hosts=tuple(used),
        per_host=per_host,
        ranks=ranks,
        by=options.by,
        bind=bind,
        binding=binding_words,
        accelerators=_accelerators(device, per_host_devices, why["accelerators"]),
        shared=shared,
        environ=dict(options.env),
        device=device,
        threads=threads,
        prefork=options.prefork,
        why=why,
        notes=(*its_job.notes, *notes),
    )


def _hosts(
    options: LaunchOptions, environ: Mapping[str, str]
) -> tuple[Job, hosts.Hosts, dict[str, str], list[str]] | None:
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(f"--hosts {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    found = scheduler.detect(environ, options.scheduler)
    why = {"scheduler": found.why["scheduler"]}
    if options.hosts is None and options.hostfile is None:
        if not found.hosts:
            return None
        return found, dict.fromkeys(found.hosts, 1), why | {"hosts": found.why["hosts"]}, []
    if options.hosts is not None:
        listed, why["hosts"] = hosts.parse_list(options.hosts), "--hosts"
    else:
        listed, why["hosts"] = hosts.parse_file(options.hostfile or ""), f"--hostfile {options.hostfile}"
    short = {name.partition(".")[0] for name in found.hosts}
    strange = [name for name in listed if name.partition(".")[0] not in short] if found.hosts else []
    if strange:
        raise LaunchError(
            f"{why['hosts']}: {', '.join(strange)} {'is' if len(strange) == 1 else 'are'} not among the "
            f"{len(found.hosts)} hosts of {found.scheduler} job {found.job_id} ({found.why['hosts']}).\n"
            "  Name hosts of the job, or leave it out of account: --scheduler none"
        )
    return found, listed, why, []


def _launcher(
    options: LaunchOptions, its_job: Job, site: Site | None, environ: Mapping[str, str], version: str | None
) -> tuple[str, str, str]:
    """Who starts the processes: its kind, its program, and why."""
    if its_job.scheduler == "slurm" and options.mpiexec is None:
        return "srun", "srun", "inside a Slurm job"
    mpiexec = "mpiexec" if version is not None and not options.mpiexec else mpi.find(options.mpiexec, environ)
    if options.mpi is not None:
        return options.mpi, mpiexec, "--mpi"
    kind, words = mpi.flavour(mpiexec) if version is None else mpi.read_version(version)
    if kind is not None:
        return kind, mpiexec, f"{mpiexec} --version: {words}"
    if site is not None and site.mpi is not None:
        return site.mpi, mpiexec, f"{site.name}'s; {mpiexec} --version does not say ({words})"
    raise LaunchError(
        f"{mpiexec} --version prints {words!r}, which is no MPI that launch knows.\n"
        f"  Say what it is like: --mpi {'|'.join(mpi.FLAVOURS)}"
    )


def _device(
    options: LaunchOptions,
    site: Site | None,
    its_job: Job,
    listed: hosts.Hosts,
    environ: Mapping[str, str],
    found: accelerators.Accelerators | None,
    build: str | None,
) -> tuple[str | None, str, int | None, str]:
    """Device type and why; devices a host and why."""
    here = any(hosts.is_here(name) for name in listed)
    if found is None and here:
        found = accelerators.find(environ=environ, build=build)
    if not here:
        found = None
    if options.device:
        device, why = options.device, "--device"
    elif environ.get(DEVICE_VARIABLE):
        device, why = environ[DEVICE_VARIABLE], "set in the environment"
    elif site is not None and site.device:
        device, why = site.device, site.name
    elif found is not None and found.device:
        device, why = found.device, f"found {found.why} on this host"
    else:
        device, why = "", "not known here: each rank looks on its host"
    if device == "cpu":
        return "cpu", why, 0, "CPU was chosen"
    if site is not None and site.ranks_per_host and site.device in (None, device):
        return device, why, site.ranks_per_host, site.name
    if its_job.gpus_per_host:
        return device or None, why, its_job.gpus_per_host, its_job.why["gpus_per_host"]
    if found is not None and found.count and device == found.device:
        return device, why, found.count, f"{found.why} on this host"
    return device or None, why, None, found.why if found is not None else "this host is none of them"


def _accelerators(device: str | None, count: int | None, why: str) -> str:
    if device == "cpu":
        return "not used: ranks compute on the CPU"
    if not count:
        return f"none known: {why}"
    return f"{count} a host" + (f", {device}" if device else "")


def _per_host(
    its_job: Job, site: Site | None, listed: hosts.Hosts, device: str | None, devices: int | None, devices_why: str
) -> tuple[int | None, str]:
    """Ranks a host where neither -n nor -ppn says it, and why; None if nothing does."""
    if its_job.tasks_per_host:
        return its_job.tasks_per_host, its_job.why["tasks_per_host"]
    slots = set(listed.values())
    if slots != {1}:
        if len(slots) > 1:
            some = ", ".join(f"{name}:{count}" for name, count in list(listed.items())[:4])
            raise LaunchError(
                f"hosts have different numbers of slots ({some}), and launch puts as many ranks on each: "
                "give -ppn RANKS."
            )
        return slots.pop(), "slots in the list of hosts"
    if devices and device != "cpu":
        return devices, f"one per accelerator: {devices_why}"
    return None, "nothing says more"


def _ranks(
    options: LaunchOptions, names: list[str], default: int | None, reason: str
) -> tuple[int, int, list[str], str]:
    """Ranks a host, ranks in all, the hosts used, and why."""
    total, per_host, nhosts = options.nproc, options.per_host, options.nhosts
    if nhosts is not None:
        if nhosts > len(names):
            raise LaunchError(
                f"-N {nhosts}: there {'is' if len(names) == 1 else 'are'} {len(names)} "
                f"host{'' if len(names) == 1 else 's'}."
            )
        names = names[:nhosts]
    if total is None:
        why = "-ppn" if per_host is not None else reason
        per_host = per_host or default or 1
        return per_host, per_host * len(names), names, f"{why}, × {len(names)} hosts"
    why = "-n" if per_host is None else "-n, -ppn"
    per_host = per_host or -(-total // len(names))
    needed = -(-total // per_host)
    if needed > len(names):
        raise LaunchError(
            f"-n {total} with {per_host} a host takes {needed} hosts, and there are {len(names)}: "
            f"at most -n {per_host * len(names)}, or a larger -ppn."
        )
    if nhosts is not None and needed < nhosts:
        raise LaunchError(
            f"-n {total} -ppn {per_host} -N {nhosts}: {total} ranks, {per_host} a host, fill {needed} "
            f"hosts, not {nhosts}. Leave one of the three out."
        )
    return per_host, total, names[:needed], why


def _binding(
    options: LaunchOptions, site: Site | None, launcher: str, per_host: int
) -> tuple[str | None, list[str], str, str]:
    """launch's own binding, or None; the launcher backend's words for it; both in words, and why."""
    of_site = site is not None and site.bind is not None
    unbound = {"pals": ["--cpu-bind", "none"], "srun": ["--cpu-bind=none"]}.get(launcher, [])
    if options.by == "host" or launcher in ("hydra", "openmpi"):
        bind = options.cpu_bind or (site.bind if site is not None else None)
        why = "--cpu-bind" if options.cpu_bind else site.name if of_site and site is not None else "not asked for"
        if bind is not None:
            binding.check(bind)
        return bind, unbound, f"{bind}, by launch" if bind else "none", why
    if options.cpu_bind is not None:
        words = ["--cpu-bind", options.cpu_bind] if launcher == "pals" else [f"--cpu-bind={options.cpu_bind}"]
        return None, words, f"{options.cpu_bind}, by {launcher}", "--cpu-bind"
    if site is not None and launcher == "pals" and site.bind_args:
        words = site.fill(site.bind_args, per_host)
        return None, words, " ".join(words), site.name
    if site is not None and launcher == "srun" and site.srun:
        return None, [], f"by srun: {' '.join(site.fill(site.srun, per_host))}", site.name
    return None, [], f"left to {launcher}", "not asked for"


def _environment(
    options: LaunchOptions,
    site: Site | None,
    its_job: Job,
    used: list[str],
    ranks: int,
    device: str | None,
    environ: Mapping[str, str],
    build: str | None,
    why: dict[str, str],
) -> tuple[dict[str, str], int | None]:
    """Variables of every rank, and the number of threads where that is said."""
    shared = {"WORLD_SIZE": str(ranks)}
    if environ.get("MASTER_ADDR"):
        shared["MASTER_ADDR"], why["MASTER_ADDR"] = environ["MASTER_ADDR"], "set in the environment"
    elif len(used) == 1:
        shared["MASTER_ADDR"], why["MASTER_ADDR"] = "127.0.0.1", "all ranks are on one host"
    else:
        suffix = site.host_suffix if site is not None else ""
        name = used[0] if used[0].endswith(suffix) else used[0].partition(".")[0] + suffix
        shared["MASTER_ADDR"] = name
        why["MASTER_ADDR"] = "the first host" + (f", with {site.name}'s suffix" if suffix and site is not None else "")
    shared["MASTER_PORT"], why["MASTER_PORT"] = _port(environ, its_job, site, used, options.attempt)
    for name, value in (site.env if site is not None else {}).items():
        if name in environ:
            why[name] = "set in the environment"
        else:
            shared[name], why[name] = value, site.name if site is not None else ""
    if device:
        shared[DEVICE_VARIABLE] = device
    build = accelerators.torch_build() if build is None else build
    if build in ("cuda", "hip"):
        shared["PYTORCH_NVML_BASED_CUDA_CHECK"] = environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    shared |= options.env
    why |= dict.fromkeys(options.env, "--env")
    given = environ.get("OMP_NUM_THREADS", "")
    if "OMP_NUM_THREADS" in options.env:
        return shared, None
    if its_job.scheduler == "pbs" and given:
        why["OMP_NUM_THREADS"] = f"cores of the rank; the {given} in the environment is PBS's, of the job's first chunk"
    elif given.isdigit() and int(given) > 0:
        why["OMP_NUM_THREADS"] = "set in the environment"
        return shared, int(given)
    else:
        why["OMP_NUM_THREADS"] = "cores of the rank, counted on its host"
    return shared, None


def _port(
    environ: Mapping[str, str], its_job: Job, site: Site | None, used: list[str], attempt: int
) -> tuple[str, str]:
    given = environ.get("MASTER_PORT")
    if given:
        if not (given.isdigit() and 0 < int(given) < 65536):
            raise LaunchError(
                f"MASTER_PORT={given} in the environment is not a port: a number from 1 to 65535 is.\n"
                "  unset MASTER_PORT and one is picked."
            )
        return given, "set in the environment"
    if site is not None and site.port:
        return str(site.port + attempt), site.name
    if hosts.is_here(used[0]):
        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(probe.getsockname()[1]), "a free port of this host"
    if its_job.job_id:
        identity = f"{its_job.scheduler} {its_job.job_id} {attempt}"
        return str(FIRST_PORT + zlib.crc32(identity.encode()) % PORTS), f"from {its_job.scheduler} job {its_job.job_id}"
    identity = f"{getpass.getuser()} {','.join(used)} {os.getpid()} {attempt}"
    return str(FIRST_PORT + zlib.crc32(identity.encode()) % PORTS), "from user, hosts and launch's pid"


def _line(launcher: str, mpiexec: str, request: Request, site: Site | None, by_host: bool) -> list[str]:
    if launcher != "srun":
        return mpi.line(launcher, mpiexec, request)
    words = [] if site is None else site.srun_by_host if by_host else site.srun
    if not words or site is None:
        words = [f"--ntasks-per-node={request.per_host}"]
        cpus = request.environ.get("SLURM_CPUS_ON_NODE") if by_host else request.environ.get("SLURM_CPUS_PER_TASK")
        return slurm.line(request, [*words, *([f"--cpus-per-task={cpus}"] if cpus else [])])
    return slurm.line(request, site.fill(words, request.per_host))


def _entry(target: Target) -> list[str]:
    """What is started: mmm.launch.host.agent, and after it python's words for the target, or `--exec` and a program."""
    words = [*target.flags, *target.tail()] if target.is_python else ["--exec", *target.command]
    return [sys.executable, "-m", "mmm.launch.host.agent", *words]


def text(words: list[str]) -> str:
    """A command line as it would be typed."""
    return shlex.join(words)
