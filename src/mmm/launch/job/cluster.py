"""The plan for ranks on the hosts of a job, or of a list: who starts them, how many, bound to what, and why.

In this order, each stated in `ClusterPlan.why`:

    hosts           --hosts, --hostfile; Slurm's job; PBS's job; else this is no cluster and `local` plans
    ranks a host    `mmm.launch.job.placement`; accelerators: the site's, GPUs the job has, those of this host, if it is
                    one of them
    device          --device; MMM_DEVICE; the site; what is found here; else each rank looks
    MASTER_ADDR     MASTER_ADDR; 127.0.0.1 on one host; the first host, with the site's suffix
    MASTER_PORT     MASTER_PORT; the site; a free one, if the first host is this one; from the job's identity, or a
                    free one where rank 0's host says that it is taken
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmm.contract import DEVICE_VARIABLE, SITE_VARIABLE
from mmm.errors import LaunchError
from mmm.launch.job import (
    accelerators,
    binding,
    hosts,
    local,
    placement,
    scheduler,
    variables,
)
from mmm.launch.job.accelerators import Accelerators
from mmm.launch.job.backend import Backend, agent, choose_backend, each_host, request_of
from mmm.launch.job.counts import is_filled
from mmm.launch.job.elastic import Elastic
from mmm.launch.job.job import Job
from mmm.launch.job.options import LaunchOptions
from mmm.launch.job.staging import Stage
from mmm.launch.job.target import Target
from mmm.machines import find as machines
from mmm.machines.machine import Machine


@dataclass(frozen=True)
class ClusterPlan:
    """Everything `Controller` needs.

    Attributes:
        launcher: "srun", "hydra", "pals" or "openmpi"; "direct": launch itself. command: its whole command line.
        site: the known machine, or the empty `Machine`.
        hosts: those used, in order. counts: how many ranks each has; the first has ranks 0 … counts[0] − 1.
        by: "rank": the launcher backend starts every rank; "host": one process a host, which forks that host's ranks.
        bind: how launch binds ranks itself; None: it does not. binding: in words.
        settings: the site's variables for every rank. device_order: its devices for local rank 0, 1, … of a host.
        shared: variables for every rank, `settings` too.
        environ: what the launcher backend itself gets on top of launch's environment.
        threads: OMP_NUM_THREADS; None: of the cores that ranks have. why: name of a value → where it came from.
        elastic: with `each`, host → command that starts its agent alone; of the spare hosts too, which come last.
    """

    target: Target
    launcher: str
    command: list[str]
    job: Job
    site: Machine
    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    by: str
    bind: str | None
    binding: str
    accelerators: str
    settings: dict[str, str]
    device_order: list[int]
    shared: dict[str, str]
    environ: dict[str, str]
    device: str | None
    threads: int | None
    prefork: bool
    stage: Stage | None
    why: dict[str, str]
    notes: tuple[str, ...] = ()
    elastic: Elastic | None = None
    each: dict[str, list[str]] = field(default_factory=dict)

    @property
    def wished_port(self) -> int | None:
        """MASTER_PORT where the host of rank 0 may have another; None: it has been given, or is known to be free."""
        return int(self.shared["MASTER_PORT"]) if self.why["MASTER_PORT"].endswith(variables.OR_FREE) else None

    @property
    def ranks(self) -> int:
        """In all."""
        return sum(self.counts)

    @property
    def per_host(self) -> int:
        """The most that a host has."""
        return max(self.counts)

    @property
    def processes(self) -> int:
        """How many the launcher backend starts."""
        return self.ranks if self.by == "rank" else len(self.hosts)


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: Accelerators | None = None,
    build: str | None = None,
    version: str | None = None,
) -> ClusterPlan | None:
    """Plan `target` on the job's hosts, or None where there are none: then this host is all there is.

    `found`, `build` and `version` stand in for this host's accelerators, its torch, and what mpiexec --version prints.
    Raises `LaunchError`.
    """
    local.refuse_inside_a_rank(environ)
    why: dict[str, str] = {}
    job, listed = _hosts(options, environ, why)
    if not listed:
        return None
    site, why["machine"] = machines.find(environ, options.site)
    backend, why["launcher"] = choose_backend(options, job, site, listed, environ, version)
    found = (found or accelerators.find(environ=environ, build=build)) if any(map(hosts.is_here, listed)) else None
    device, why[DEVICE_VARIABLE] = _device(options, site, environ, found)
    devices, why["accelerators"] = _devices(device, site, job, found)
    placed = placement.place(options, job, listed, None if device == "cpu" else devices, why["accelerators"])
    used, counts, why["ranks"] = placed.hosts, placed.counts, placed.why
    options, by_notes = _started_by(options, backend, counts)
    bind, words, binding_words, why["cpu binding"] = _binding(options, site, backend.kind, max(counts))
    order = _device_order(site, options, backend, device)
    settings = variables.of_site(site, options, environ, why)
    shared = variables.of_cluster(options, site, job, used, sum(counts), device, environ, build, why)
    shared |= settings | _site_for_ranks(site, settings, order)
    threads, why["OMP_NUM_THREADS"] = variables.threads(options, job, environ)
    request = request_of(options, job, placed, listed, words, environ)
    return ClusterPlan(
        target=target,
        launcher=backend.kind,
        command=[*backend.line(request, options.by == "host"), *agent(target)],
        job=job,
        site=site,
        hosts=used,
        counts=counts,
        by=options.by,
        bind=bind,
        binding=binding_words,
        accelerators=_in_words(device, devices, why["accelerators"]),
        settings=settings,
        device_order=order,
        shared=shared,
        environ=dict(options.env),
        device=device,
        threads=threads,
        prefork=options.prefork,
        stage=options.stage,
        why=why,
        notes=(*machines.old_places(environ), *job.notes, *placed.notes, *by_notes),
        elastic=options.elastic,
        each=each_host(target, options, backend, request, job) if options.elastic is not None else {},
    )


def _hosts(options: LaunchOptions, environ: Mapping[str, str], why: dict[str, str]) -> tuple[Job, hosts.Hosts]:
    """The job, and the hosts to use with their slots; none where ranks run on this host alone."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(f"--hosts {options.hosts} and --hostfile {options.hostfile}: give one of them.")
    job = scheduler.detect(environ, options.scheduler)
    why["scheduler"] = job.why["scheduler"]
    if options.hosts is not None:
        listed, why["hosts"] = hosts.parse_list(options.hosts), "--hosts"
    elif options.hostfile is not None:
        listed, why["hosts"] = hosts.parse_file(options.hostfile), f"--hostfile {options.hostfile}"
    else:
        why["hosts"] = job.why.get("hosts", "")
        return job, dict.fromkeys([name for name in job.hosts if name not in options.spare], 0)
    listed = hosts.merged(listed)
    short = {name.partition(".")[0] for name in job.hosts}
    strange = [name for name in listed if name.partition(".")[0] not in short] if job.hosts else []
    if strange:
        raise LaunchError(
            f"{why['hosts']}: {', '.join(strange)} {'is' if len(strange) == 1 else 'are'} not among the "
            f"{len(job.hosts)} hosts of {job.scheduler} job {job.job_id} ({job.why['hosts']}).\n"
            "  Name hosts of the job, or leave it out of account: --scheduler none"
        )
    return job, listed


def _started_by(
    options: LaunchOptions, backend: Backend, counts: tuple[int, ...]
) -> tuple[LaunchOptions, tuple[str, ...]]:
    """The options, with a process a host where the backend cannot start these ranks; and what is to be said."""
    if backend.kind != "pals" or options.by != "rank" or is_filled(counts):
        return options, ()
    note = "pals puts as many ranks on each host: here it starts one process a host, which forks its ranks"
    return replace(options, by="host"), (note,)


def _device_order(site: Machine, options: LaunchOptions, backend: Backend, device: str | None) -> list[int]:
    """The site's devices for local rank 0, 1, …; none where each rank sees all of them, or its own alone."""
    shown = site.shows_devices(options.by, backend.kind, device) and site.device_variable not in options.env
    return site.device_order if shown else []


def _site_for_ranks(site: Machine, settings: dict[str, str], order: list[int]) -> dict[str, str]:
    """The variable by which ranks know the site; none where it is not known."""
    told = {"name": site.name, "set": settings, "device_order": order}
    return {SITE_VARIABLE: json.dumps(told)} if site.name else {}


def _device(
    options: LaunchOptions, site: Machine, environ: Mapping[str, str], found: Accelerators | None
) -> tuple[str | None, str]:
    """The device type, and why. `found`: on this host, if it is one of them."""
    if given := variables.given_device(options.device, environ):
        return given
    if site.device:
        return site.device, site.name
    if found is not None and found.device:
        return found.device, f"found {found.why} on this host"
    return None, "not known here: each rank looks on its host"


def _devices(device: str | None, site: Machine, job: Job, found: Accelerators | None) -> tuple[int | None, str]:
    """Devices a host, None where nothing says, and why."""
    if device == "cpu":
        return 0, "CPU was chosen"
    if site.ranks_per_host and site.device in ("", device):
        return site.ranks_per_host, site.name
    if job.gpus_per_host:
        return job.gpus_per_host, job.why["gpus_per_host"]
    if found is None:
        return None, "this host is none of them"
    if found.count and device == found.device:
        return found.count, f"{found.why} on this host"
    return None, found.why


def _in_words(device: str | None, devices: int | None, why: str) -> str:
    if device == "cpu":
        return "not used: ranks compute on the CPU"
    if not devices:
        return f"none known: {why}"
    return f"{devices} a host" + (f", {device}" if device else "")


def _binding(
    options: LaunchOptions, site: Machine, launcher: str, per_host: int
) -> tuple[str | None, list[str], str, str]:
    """launch's own binding, or None; the launcher backend's words for it; both in words, and why."""
    if options.by == "host" or launcher in ("hydra", "openmpi"):
        bind = options.cpu_bind or site.bind
        why = "--cpu-bind" if options.cpu_bind else site.name if bind else "not asked for"
        if bind is not None:
            binding.check(bind)
        unbound = {"pals": ["--cpu-bind", "none"], "srun": ["--cpu-bind=none"]}.get(launcher, [])
        return bind, unbound, f"{bind}, by launch" if bind else "none", why
    if options.cpu_bind is not None:
        words = ["--cpu-bind", options.cpu_bind] if launcher == "pals" else [f"--cpu-bind={options.cpu_bind}"]
        return None, words, f"{options.cpu_bind}, by {launcher}", "--cpu-bind"
    if launcher == "pals" and site.bind_args:
        words = site.fill(site.bind_args, per_host)
        return None, words, " ".join(words), site.name
    if launcher == "srun" and site.srun:
        return None, [], f"by srun: {' '.join(site.fill(site.srun, per_host))}", site.name
    return None, [], f"left to {launcher}", "not asked for"
