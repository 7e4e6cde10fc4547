"""The variables that ranks find in their environment, and where each value comes from."""

import getpass
import os
from collections.abc import Mapping, Sequence

from mmm.contract import DEVICE_VARIABLE, port_of
from mmm.errors import LaunchError
from mmm.launch.job import accelerators, hosts
from mmm.launch.job.job import Job
from mmm.launch.job.options import LaunchOptions
from mmm.machines.machine import Machine

OR_FREE = "; or a free one, where its host says that it is taken"


def given_device(device: str | None, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The device type that the user has chosen, and how; None if there is no choice."""
    if device:
        return device, "--device"
    chosen = environ.get(DEVICE_VARIABLE)
    return (chosen, "set in the environment") if chosen else None


def torch_variables(build: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What torch has to find when it is imported: asking it for devices must not open one before the fork."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    return {name: environ.get(name, "1")} if build in ("cuda", "hip") else {}


def given_port(environ: Mapping[str, str]) -> str | None:
    """MASTER_PORT of the environment. Raises `LaunchError` if that is no port."""
    given = environ.get("MASTER_PORT")
    if given and not (given.isdigit() and 0 < int(given) < 65536):
        raise LaunchError(
            f"MASTER_PORT={given} in the environment is not a port: a number from 1 to 65535 is.\n"
            "  unset MASTER_PORT and one is picked."
        )
    return given


def of_cluster(
    options: LaunchOptions,
    site: Machine,
    job: Job,
    used: Sequence[str],
    ranks: int,
    device: str | None,
    environ: Mapping[str, str],
    build: str | None,
    why: dict[str, str],
) -> dict[str, str]:
    """Variables of every rank. Adds where they come from to `why`."""
    shared = {"WORLD_SIZE": str(ranks)}
    shared |= master(environ, job, site, used, options.attempt, why)
    if device:
        shared[DEVICE_VARIABLE] = device
    shared |= torch_variables(accelerators.torch_build() if build is None else build, environ)
    why |= dict.fromkeys(options.env, "--env")
    return shared | options.env


def master(
    environ: Mapping[str, str], job: Job, site: Machine, used: Sequence[str], attempt: int, why: dict[str, str]
) -> dict[str, str]:
    """Where rank 0 of an attempt on the hosts `used` listens. Adds to `why`."""
    address, why["MASTER_ADDR"] = _address(environ, site, used)
    port, why["MASTER_PORT"] = _port(environ, job, site, used, attempt)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def of_site(site: Machine, options: LaunchOptions, environ: Mapping[str, str], why: dict[str, str]) -> dict[str, str]:
    """The site's variables that the user has not set. Adds where they come from to `why`."""
    found = {}
    for name, (value, source) in site.variables(options.by).items():
        if name in environ:
            why[name] = "set in the environment"
        elif name not in options.env:
            found[name], why[name] = value, source
    return found


def _address(environ: Mapping[str, str], site: Machine, used: Sequence[str]) -> tuple[str, str]:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "set in the environment"
    if len(used) == 1:
        return "127.0.0.1", "all ranks are on one host"
    suffix = site.host_suffix
    name = used[0] if used[0].endswith(suffix) else used[0].partition(".")[0] + suffix
    return name, "the first host" + (f", with {site.name}'s suffix" if suffix else "")


def _port(environ: Mapping[str, str], job: Job, site: Machine, used: Sequence[str], attempt: int) -> tuple[str, str]:
    if given := given_port(environ):
        return given, "set in the environment"
    if site.port:
        return str(site.port + attempt), site.name
    if hosts.is_here(used[0]):
        return str(hosts.free_port("")), "a free port of this host"
    if job.job_id:
        identity, why = f"{job.scheduler} {job.job_id} {attempt}", f"from {job.scheduler} job {job.job_id}"
    else:
        identity = f"{getpass.getuser()} {','.join(used)} {os.getpid()} {attempt}"
        why = "from user, hosts and launch's pid"
    return str(port_of(identity)), why + OR_FREE


def threads(options: LaunchOptions, job: Job, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """OMP_NUM_THREADS where it is given as a number, and where it comes from."""
    given = environ.get("OMP_NUM_THREADS", "")
    if "OMP_NUM_THREADS" in options.env:
        return None, "--env"
    if job.scheduler == "pbs" and given:
        return None, f"cores of the rank; the {given} in the environment is PBS's, of the job's first chunk"
    if given.isdigit() and int(given) > 0:
        return int(given), "set in the environment"
    return None, "cores of the rank, counted on its host"
