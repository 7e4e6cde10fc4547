"""`launch --elastic MIN:MAX`: what is asked for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmm.errors import LaunchError
from mmm.launch.plan import hosts

REJOIN = 60.0  # s


@dataclass(frozen=True)
class Elastic:
    """least, most: ranks that the run may go on with; it begins with the most. rejoin: seconds after the last failure
    at which ranks that were killed, and hosts that were lost, are tried again. spare: hosts for those that are lost."""

    least: int
    most: int
    rejoin: float = REJOIN
    spare: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.least} to {self.most} ranks" + (f"; spare: {' '.join(self.spare)}" if self.spare else "")


def from_words(
    words: str | None, rejoin: float | None, spare: str | None, nproc: int | None, retries: int | None, stage: bool
) -> Elastic | None:
    """What the command line asks for; None where it is not asked for. Raises `LaunchError`."""
    if words is None:
        for name, given in (("--rejoin", rejoin), ("--spare-hosts", spare)):
            if given is not None:
                raise LaunchError(f"{name} is of --elastic MIN:MAX, which is not given.")
        return None
    match = re.fullmatch(r"(-?\d+):(-?\d+)", words)
    if match is None:
        raise LaunchError(f"--elastic {words}: write MIN:MAX, the fewest and the most ranks, such as 2:8.")
    least, most = int(match[1]), int(match[2])
    if least < 1:
        raise LaunchError(f"--elastic {words}: MIN has to be at least 1.")
    if least > most:
        raise LaunchError(f"--elastic {words}: MIN is above MAX.")
    if nproc not in (None, most):
        raise LaunchError(f"-n {nproc} --elastic {words}: it begins with MAX ranks. Leave -n out.")
    if retries == 0:
        raise LaunchError(f"--retries 0 --elastic {words}: the run could not go on. Leave --retries out, or give more.")
    if stage:
        raise LaunchError(f"--stage and --elastic {words} do not go together: leave one out.")
    return Elastic(least, most, rejoin or REJOIN, tuple(hosts.parse_list(spare)) if spare else ())


def check_hosts(spare: Sequence[str], used: Sequence[str], of_job: Sequence[str]) -> None:
    """Raise `LaunchError` where --spare-hosts are none."""
    short = {hosts.host_key(name) for name in of_job}
    for name in spare:
        if name in used:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is to have ranks from the beginning.")
        if short and hosts.host_key(name) not in short:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is not among the job's hosts.")
