"""Known machines, as data: one JSON file each, in `sites/` here, in `~/.config/mmm/sites`, or named by MMM_SITES."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from mmm.errors import LaunchError
from mmm.outside import read_json, short

BUILT_IN = Path(__file__).parent / "sites"
VARIABLE = "MMM_SITES"  # files and folders, as in PATH


@dataclass(frozen=True)
class Site:
    """How one machine is used. Every field but `name` may be left out of its file.

    In `bind_args`, `srun` and `srun_by_host`, `{per_host}` is ranks a host, `{cpus}` the CPUs of each (`cpus_per_host`
    over ranks), `{gpus}` the accelerators of a host (`ranks_per_host`).

    Attributes:
        match: environment variable → regular expression; the site is recognised where one of them is found.
        mpi: "pals", "hydra" or "openmpi", for an mpiexec that does not say what it is.
        device_variable, device_order: local rank i is shown only device `device_order[i]`, by that variable, unless
            srun gives each task its own device (`--gpu-bind`).
        bind: how launch binds ranks itself, with --ranks-by host. bind_args: what mpiexec is given for the same.
        srun, srun_by_host: further words for srun, one process a rank, or one a host.
        host_suffix: what makes a host's name an address on the fast network, for MASTER_ADDR.
        env: variables for every rank, such as NCCL_SOCKET_IFNAME, unless the user has set them. env_by_rank: further
            ones, for ranks that the launcher backend has started itself: they need its MPI.
        advice: what launch cannot do, a line each; said where ranks are on several hosts.
        sources: field, or variable in `env`, → the page that its value is from; `source` where it is not named.
    """

    name: str
    about: str = ""
    source: str = ""
    match: dict[str, str] = field(default_factory=dict)
    mpi: str | None = None
    ranks_per_host: int | None = None
    cpus_per_host: int | None = None
    device: str | None = None
    backend: str | None = None
    device_variable: str | None = None
    device_order: list[int] = field(default_factory=list)
    bind: str | None = None
    bind_args: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    srun_by_host: list[str] = field(default_factory=list)
    host_suffix: str = ""
    port: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    env_by_rank: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def variables(self, by: str) -> dict[str, tuple[str, str]]:
        """Variable → value and source, of ranks started by ("rank") the launcher backend or by ("host") launch."""
        named = {"env": self.env} | ({"env_by_rank": self.env_by_rank} if by == "rank" else {})
        return {
            name: (value, self.source_of(name if name in self.sources else key))
            for key, some in named.items()
            for name, value in some.items()
        }

    def source_of(self, what: str) -> str:
        """The site's name, and the page that field or variable `what` is from."""
        return f"{self.name}: {self.sources.get(what, self.source)}".removesuffix(": ")

    def shows_devices(self, by: str, launcher: str, device: str | None) -> bool:
        """Whether launch shows each rank its device, because the launcher backend does not."""
        by_srun = launcher == "srun" and by == "rank" and any(word.startswith("--gpu-bind") for word in self.srun)
        return bool(self.device_variable) and device == self.device and not by_srun

    def fill(self, words: list[str], per_host: int) -> list[str]:
        """`words` with their `{…}` filled in."""
        cpus = (self.cpus_per_host or 0) // per_host
        values = {"per_host": per_host, "cpus": max(1, cpus), "gpus": self.ranks_per_host or per_host}
        return [word.format(**values) for word in words]


KINDS: dict[str, type] = {
    "match": dict,
    "env": dict,
    "env_by_rank": dict,
    "sources": dict,
    "advice": list,
    "device_order": list,
    "bind_args": list,
    "srun": list,
    "srun_by_host": list,
    "ranks_per_host": int,
    "cpus_per_host": int,
    "port": int,
}


def find(environ: Mapping[str, str], name: str | None = None) -> tuple[Site, str]:
    """The site named `name`, or the one whose `match` this environment fits, and why; `Site("")` if there is none.

    Raises:
        LaunchError: no such site, two that fit, or a site's file that is wrong.
    """
    known = load(environ)
    if name is not None:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise LaunchError(
                f"--site {name}: not known.{hint} There are {', '.join(known)}; {VARIABLE} and "
                f"{_users(environ)} add others."
            )
        return known[name.lower()], "--site"
    fits: dict[str, tuple[Site, str]] = {}
    for site in known.values():
        for variable, pattern in site.match.items():
            if variable in environ and re.search(pattern, environ[variable]):
                fits.setdefault(site.name, (site, f"{variable}={environ[variable]}"))
    if len(fits) > 1:
        both = " and ".join(f"{site.name} ({why})" for site, why in fits.values())
        raise LaunchError(f"this environment fits {both}: say which with --site NAME.")
    return next(iter(fits.values())) if fits else (Site(""), "no known site's variables in the environment")


def load(environ: Mapping[str, str]) -> dict[str, Site]:
    """All sites, by their names in small letters. The user's own replace those that come with the package."""
    places = [str(BUILT_IN), str(_users(environ)), *environ.get(VARIABLE, "").split(os.pathsep)]
    found = {}
    for place in filter(None, places):
        path = Path(place).expanduser()
        if place not in places[:2] and not os.path.exists(path):
            raise LaunchError(f"{VARIABLE} names {place}, and there is no such file or folder.")
        for file in sorted(path.glob("*.json")) if os.path.isdir(path) else [path] if os.path.exists(path) else []:
            site = read(file)
            found[site.name.lower()] = site
    return found


def read(path: Path) -> Site:
    """The site in one file. Raises `LaunchError`, with the file's name and what is wrong in it."""
    data = read_json(path, LaunchError, name=f"site file {path}")
    names = [f.name for f in fields(Site)]
    if not isinstance(data.get("name"), str) or not data["name"]:
        raise LaunchError(f'site file {path}: it has to be one JSON object with a "name".')
    for key, value in data.items():
        if key not in names:
            near = difflib.get_close_matches(key[:100], names, n=1)
            raise LaunchError(
                f"site file {path}: {short(key)} is not known."
                + (f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(names)}.")
            )
        kind = KINDS.get(key, str)
        inner = [*value] if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
        wanted = int if key == "device_order" else str
        if not isinstance(value, kind) or isinstance(value, bool) or not all(isinstance(v, wanted) for v in inner):
            raise LaunchError(f"site file {path}: {key!r} is {short(value)}; it has to be {_say(kind, wanted)}.")
        if isinstance(value, int) and value < 1:
            raise LaunchError(f"site file {path}: {key!r} is {value}; it has to be at least 1.")
    for key, pattern in data.get("match", {}).items():
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise LaunchError(f"site file {path}: {key}'s {pattern!r} is no regular expression: {error}") from None
    site = Site(**data)
    for words in (site.bind_args, site.srun, site.srun_by_host):
        try:
            site.fill(words, 1)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise LaunchError(
                f"site file {path}: {words}: only {{per_host}}, {{cpus}} and {{gpus}} can be filled in."
            ) from None
    if (site.port or 0) > 65535:
        raise LaunchError(f"site file {path}: port {site.port} is none: they end at 65535.")
    if site.mpi not in (None, "pals", "hydra", "openmpi"):
        raise LaunchError(f"site file {path}: mpi {site.mpi!r} is not one of pals, hydra, openmpi.")
    return site


def _users(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    return Path(home).expanduser() / "mmm" / "sites"


def _say(kind: type, inner: type) -> str:
    wanted = {int: "a whole number", str: "a string", list: "a list", dict: "an object"}[kind]
    return f"{wanted} of {'wanted numbers' if inner is int else 'strings'}" if kind in (list, dict) else wanted
