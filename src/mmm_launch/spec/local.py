"""The plan for ranks on this host alone: how many, with which environment, and why."""

import os
import socket
from collections.abc import Mapping

from mmm_launch.contract import DEVICE_VARIABLE, check_loopback, place_of_rank
from mmm_launch.errors import LaunchError
from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, hosts, scheduler, variables
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.host_spec import HostSpec, available_cores, make
from mmm_launch.spec.launch_spec import LOCAL, LaunchSpec, Value
from mmm_launch.spec.options import MAX_RANKS, LaunchOptions

DEFAULT_CPU_RANKS = 4


def plan(
    target: Target,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] = os.environ,
    found: Accelerators | None = None,
    build: str | None = None,
) -> LaunchSpec:
    """Plan `target` on this host. `found` and `build` stand in for what the host has.

    Raises `LaunchError` where the options or the environment do not allow it: options that only a cluster has; already
    a rank; a MASTER_PORT that is no free port.
    """
    refuse_inside_a_rank(environ)
    check(options)
    build = accelerators.torch_build() if build is None else build
    found = found or accelerators.find(build=build, environ=environ)
    device = variables.given_device(options.device, environ)
    device = device or Value(found.device, f"found {found.why}" if found.device else "")
    places = next(iter(options.places.values()), [])
    ranks, device, notes = _ranks(len(places) or options.nproc or options.per_host, device, found)
    check_loopback()
    shared = {
        "WORLD_SIZE": Value(str(ranks.value), ""),
        "LOCAL_WORLD_SIZE": Value(str(ranks.value), ""),
        "MASTER_ADDR": Value("127.0.0.1", "all ranks are on this host"),
        "MASTER_PORT": _port(environ),
    }
    bind = options.cpu_bind if options.cpu_bind != "none" else None
    threads = f"--cpu-bind {bind}" if bind else f"{available_cores()} cores, {ranks.value} ranks"
    if environ.get("OMP_NUM_THREADS"):
        threads = "set in the environment"
        shared["OMP_NUM_THREADS"] = Value(environ["OMP_NUM_THREADS"], threads)
    if device.value:
        shared[DEVICE_VARIABLE] = Value(device.value, device.source)
    shared |= variables.torch_variables(build, environ)
    shared |= {name: Value(value, "--env") for name, value in options.env.items()}
    return LaunchSpec(
        target=target,
        launcher=Value(LOCAL, "all ranks are on this host"),
        job=scheduler.detect(environ, options.scheduler),
        hosts=Value((socket.gethostname(),), "no --hosts, no --hostfile"),
        counts=Value((ranks.value,), ranks.source),
        device=device,
        shared=shared,
        threads=Value(None, threads),
        prefork=options.prefork,
        bind=Value(bind, "--cpu-bind"),
        notes=notes,
        stage=options.stage,
        elastic=options.elastic,
        places=tuple(options.places.values()),
    )


def host_spec(plan: LaunchSpec, copy: str | None = None) -> HostSpec:
    """What a local plan's fork server is given. Raises `LaunchError`: the binding is not possible on this host.

    Args:
        copy: where the environment that was staged is.
    """
    command = plan.host_command(0, 0, plan.variables)
    if plan.stage is not None and copy:
        command["stage"] = {"source": plan.stage.source, "copy": copy}
    return make(plan.target, command)


def _ranks(
    asked: int | None, device: Value[str | None], found: Accelerators
) -> tuple[Value[int], Value[str | None], tuple[str, ...]]:
    """How many ranks, on which device, and what is to be said of it."""
    if asked is not None:
        return Value(asked, "-n"), device, ()
    if device.value == "cpu" or (device.value is None and not found.device):
        reason = "CPU was chosen" if device.value == "cpu" else f"no accelerator found ({found.why})"
        note = f"{reason}: {DEFAULT_CPU_RANKS} CPU ranks (choose with -n)"
        cpu: Value[str | None] = Value("cpu", device.source or "no accelerator found")
        return Value(DEFAULT_CPU_RANKS, "-n not given, no accelerator to count"), cpu, (note,)
    if device.value == found.device:
        return Value(found.count, f"one per accelerator: {found.why}"), device, ()
    if device.value == "mps":
        return Value(1, "mps is one device"), device, ()
    why = f"no {device.value} device found ({found.why})"
    return Value(1, f"-n not given, {why}"), device, (f"{why}: 1 rank (choose with -n)",)


def check(options: LaunchOptions) -> None:
    """Raises `LaunchError` for options that only a cluster has."""
    only = {
        "--mpiexec": options.mpiexec,
        "--mpi": options.mpi,
        "--launcher-args": " ".join(options.launcher_args),
        "--site": options.site,
        "--spare-hosts": ",".join(options.spare),
        "-N": options.nhosts if options.nhosts != 1 else None,
    }
    for name, value in only.items():
        if value:
            raise LaunchError(
                f"{name} {value}: ranks on this host alone are started by launch itself. Name the hosts "
                "(--hosts, --hostfile), or start inside a PBS or Slurm job."
            )
    if options.nproc and options.per_host and options.nproc != options.per_host:
        raise LaunchError(f"-n {options.nproc} -ppn {options.per_host}: on one host they are the same. Leave one out.")
    ranks = options.nproc or options.per_host
    if ranks is not None and ranks > MAX_RANKS:
        raise LaunchError(f"-n {ranks}: the number of ranks on a host must be from 1 to {MAX_RANKS}.")


def refuse_inside_a_rank(environ: Mapping[str, str]) -> None:
    """Raise `LaunchError` where some launcher has started this process as one of its ranks."""
    name = place_of_rank(environ)
    if name is not None:
        raise LaunchError(
            f"already a rank ({name}={environ[name]} in the environment): each rank would start ranks of its own.\n"
            f"  Start one launch, not one a rank. If this process is no rank: unset {name}"
        )


def _port(environ: Mapping[str, str]) -> Value[str]:
    given = variables.given_port(environ)
    if not given:
        return Value(str(hosts.free_port()), "a free port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(given)))
        except OSError as error:
            raise LaunchError(
                f"MASTER_PORT={given} in the environment cannot be used: {error.strerror}.\n"
                "  unset MASTER_PORT and a free one is picked, or set another."
            ) from None
    return Value(given, "set in the environment")
