"""The variables that ranks find in their environment, and where each value comes from."""

import getpass
import os
from collections.abc import Mapping, Sequence

from mmm_launch.contract import DEVICE_VARIABLE, port_of
from mmm_launch.errors import LaunchError
from mmm_launch.machines.machine import Machine
from mmm_launch.spec import accelerators, hosts
from mmm_launch.spec.hosts import Job
from mmm_launch.spec.launch_spec import Value
from mmm_launch.spec.options import LaunchOptions


def given_device(device: str | None, environ: Mapping[str, str]) -> Value[str | None] | None:
    """The device type that the user has chosen; None if there is no choice."""
    if device:
        return Value(device, "--device")
    chosen = environ.get(DEVICE_VARIABLE)
    return Value(chosen, "set in the environment") if chosen else None


def torch_variables(build: str, environ: Mapping[str, str]) -> dict[str, Value[str]]:
    """What torch has to find when it is imported."""
    name, why = "PYTORCH_NVML_BASED_CUDA_CHECK", "asking for devices must not open one before the fork"
    return {name: Value(environ.get(name, "1"), why)} if build in ("cuda", "hip") else {}


def given_port(environ: Mapping[str, str]) -> str | None:
    """MASTER_PORT of the environment. Raises `LaunchError` if that is no port."""
    given = environ.get("MASTER_PORT")
    if given and not (given.isdigit() and 0 < int(given) < 65536):
        raise LaunchError(f"MASTER_PORT={given} in the environment is not a port. Without MASTER_PORT one is picked.")
    return given


def of_cluster(
    options: LaunchOptions,
    site: Machine,
    job: Job,
    used: Sequence[str],
    ranks: int,
    device: Value[str | None],
    environ: Mapping[str, str],
    build: str | None,
) -> dict[str, Value[str]]:
    """Variables of every rank."""
    shared = {"WORLD_SIZE": Value(str(ranks), "launch")}
    shared |= master(environ, job, site, used, options.attempt)
    if device.value:
        shared[DEVICE_VARIABLE] = Value(device.value, device.source)
    shared |= torch_variables(accelerators.torch_build() if build is None else build, environ)
    return shared | {name: Value(value, "--env") for name, value in options.env.items()}


def master(
    environ: Mapping[str, str], job: Job, site: Machine, used: Sequence[str], attempt: int
) -> dict[str, Value[str]]:
    """Where rank 0 of an attempt on the hosts `used` listens."""
    return {"MASTER_ADDR": _address(environ, site, used), "MASTER_PORT": _port(environ, job, site, used, attempt)}


def of_site(site: Machine, options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, Value[str]]:
    """The site's variables that the user has not set."""
    return {
        name: Value(value, source)
        for name, (value, source) in site.variables().items()
        if name not in environ and name not in options.env
    }


def _address(environ: Mapping[str, str], site: Machine, used: Sequence[str]) -> Value[str]:
    if environ.get("MASTER_ADDR"):
        return Value(environ["MASTER_ADDR"], "set in the environment")
    if len(used) == 1:
        return Value("127.0.0.1", "all ranks are on one host")
    suffix = site.host_suffix
    name = used[0] if used[0].endswith(suffix) else used[0].partition(".")[0] + suffix
    return Value(name, "the first host" + (f", with {site.name}'s suffix" if suffix else ""))


def _port(environ: Mapping[str, str], job: Job, site: Machine, used: Sequence[str], attempt: int) -> Value[str]:
    if given := given_port(environ):
        return Value(given, "set in the environment")
    if site.port:
        return Value(str(site.port + attempt), site.name)
    if hosts.is_here(used[0]):
        return Value(str(hosts.free_port("")), "a free port of this host")
    if job.job_id:
        identity, why = f"{job.scheduler} {job.job_id} {attempt}", f"from {job.scheduler} job {job.job_id}"
    else:
        identity = f"{getpass.getuser()} {','.join(used)} {os.getpid()} {attempt}"
        why = "from user, hosts and launch's pid"
    or_free = "; or a free one, where its host says that it is taken"
    return Value(str(port_of(identity)), why + or_free, is_wish=True)


def threads(options: LaunchOptions, job: Job, environ: Mapping[str, str]) -> Value[int | None]:
    """OMP_NUM_THREADS where it is given as a number."""
    given = environ.get("OMP_NUM_THREADS", "")
    if "OMP_NUM_THREADS" in options.env:
        return Value(None, "--env")
    if job.scheduler == "pbs" and given:
        return Value(None, f"cores of the rank; the {given} in the environment is PBS's, of the job's first chunk")
    if given.isdigit() and int(given) > 0:
        return Value(int(given), "set in the environment")
    return Value(None, "cores of the rank, counted on its host")
