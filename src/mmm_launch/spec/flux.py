"""Flux: reads a job by asking its broker, and makes the command line of `flux run`.

The shell of `flux alloc` and the script of `flux batch` have only FLUX_URI in their environment: the address of the
job's own broker, which knows the rest.

Source: the manual of flux-core, flux-environment(7), "Initial program environment".
"""

import re
import subprocess
from collections.abc import Mapping, Sequence

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job

# Seconds in which the broker has to answer.
PATIENCE = 30.0


def detect(environ: Mapping[str, str]) -> Job | None:
    """Return the Flux job that this process is in, or None outside of one.

    Raises:
        LaunchError: the job's broker does not answer, or not as expected.
    """
    uri = environ.get("FLUX_URI")
    if not uri:
        return None
    host_list = _ask(environ, "getattr", "hostlist")
    names = tuple(hosts.expand(host_list))
    why = {"scheduler": f"FLUX_URI={uri}", "hosts": "flux getattr hostlist"}
    # One number, or one for each state that the job's resources are in: all of them are the job's.
    question = ("resource", "list", "-n", "-o", "{ngpus}")
    counts = _ask(environ, *question).split()
    if not all(re.fullmatch("[0-9]{1,9}", count) for count in counts):
        command = " ".join(question)
        answer = " ".join(counts)
        raise LaunchError(f"flux {command} prints {answer[:80]!r}, and not numbers of GPUs.")
    total = sum(map(int, counts))
    gpus, left_over = divmod(total, len(names))
    job = Job("flux", uri, names, why)
    # Hosts with different numbers of GPUs: nothing says how many each one has.
    if gpus == 0 or left_over:
        return job
    why["gpus_per_host"] = "flux resource list"
    return Job("flux", uri, names, why, gpus_per_host=gpus)


def _ask(environ: Mapping[str, str], *question: str) -> str:
    """Return what a command of Flux's prints. Raises `LaunchError`: it is not there, or fails."""
    command = " ".join(question)
    try:
        done = subprocess.run(
            ["flux", *question],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        problem = done.stderr.strip()
    except FileNotFoundError:
        problem = "flux is not on PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    raise LaunchError(
        f"FLUX_URI={environ['FLUX_URI']} in the environment says that this is inside a Flux job, and "
        f"`flux {command}` does not answer: {problem or 'it prints nothing'}.\n"
        "  If it is not, ignore it: --scheduler none"
    )


def line(used: Sequence[str], is_subset: bool) -> list[str]:
    """Make the part of flux run's command line that stands before the command. It starts one agent on each host.

    Args:
        used: names of the hosts.
        is_subset: the job has other hosts too.
    """
    count = str(len(used))
    command = ["flux", "run", "-N", count, "-n", count, "--exclusive"]
    if is_subset:
        names = ",".join(used)
        command.append(f"--requires=hosts:{names}")
    # launch binds ranks itself: Flux would bind the agent, and give all ranks of the host its share of the GPUs.
    return [*command, "-o", "cpu-affinity=off", "-o", "gpu-affinity=off"]
