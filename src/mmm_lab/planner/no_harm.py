"""A dry run does no harm: a program that starts no run is refused before its first line, and no program writes a file.

The first look is at the program's source. The second is from inside: Python says before it opens, renames or removes a
file, or starts another program (`sys.addaudithook`), and then the dry run ends. Libraries that write files in C do not
say so; `torch.save` and `h5py.File` are told to.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import torch

from mmm.errors import ConfigError
from mmm_launch.program.preloads import preloads
from mmm_launch.program.target import Target, find_module, read_source, source_of

START = "start_run"
# A program that finds modules by names that it computes may start a run in one of them.
ANY_MODULE = ("import_module", "__import__", "runpy")
# Modules of this package that are programs. The others only define what programs call.
PROGRAMS = ("mmm.trainer.", "mmm.examples.")
# The events that write, and which of their arguments are paths. A folder that paths are relative to comes last.
WRITES = {
    "os.chmod": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.truncate": 1,
}
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
# Libraries ask these for what the host has, while they are imported.
ASKED = ("cc", "gcc", "git", "ld", "ldconfig", "lscpu", "nvidia-smi", "rocm-smi", "uname")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HOME_CACHES = (".cache", ".config/matplotlib", ".nv", ".triton")
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WAYS_OUT = (
    "docs/your-script.md says what makes a program start a run; mmm verify --program takes a program as it is, and "
    "runs it"
)


def check_starts_a_run(target: Target) -> None:
    """Refuse a program that names `start_run` nowhere. Nothing of it is imported or run.

    Raises:
        ConfigError: it would do all its work for real.
    """
    if not _may_start_a_run(target):
        raise ConfigError(
            f"dry run: {target.name} does not start a run: neither it nor a module that it imports names {START}. It "
            f"would train for real, and write its files. {WAYS_OUT}"
        )


def _may_start_a_run(target: Target) -> bool:
    """Whether the program's source, or what it imports when it starts, names `start_run`."""
    source: str | None = target.name
    if target.kind == "script":
        source = read_source(target.script())
    elif target.kind == "module":
        spec = find_module(target.name, target.search_path())
        source = source_of(spec) if spec else None
    if source is None:
        # Compiled code, a zip file: only running it tells.
        return True
    if any(word in source for word in (START, *ANY_MODULE)):
        return True
    return any(START in imported.names or imported.module.startswith(PROGRAMS) for imported in preloads(target))


def forbid_writing(folder: str, end: Callable[[ConfigError], None]) -> None:
    """From here on this process writes only temporary files and caches, and starts no program. There is no way back.

    Args:
        folder: for temporary files. Others of this host may have files in the usual one.
        end: ends the process with this error. The program could catch an exception.
    """
    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder
    home = Path.home()
    allowed: list[str | Path] = [folder, "/proc"]
    allowed += [home / name for name in HOME_CACHES]
    allowed += [os.environ[name] for name in CACHES if os.environ.get(name)]
    folders = [os.path.realpath(path) for path in allowed]

    def refuse(would: str) -> None:
        end(
            ConfigError(
                f"dry run: the program would {would}, and a dry run writes nothing. Let only the main rank do that, by "
                f"`if whoami().is_main:` or `if run.rank.is_main:`, since a dry run has none. {WAYS_OUT}"
            )
        )

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS:
            program = os.fspath(args[0])
            if os.path.basename(program) not in ASKED:
                refuse(f"start {program}")
        elif event == "open":
            path, _, flags = args
            if flags & WRITING:
                check_path(event, path, None)
        elif event in WRITES:
            for path in args[: WRITES[event]]:
                check_path(event, path, args[-1])

    def check_path(event: str, path: Any, beside: Any) -> None:
        # A number is a file that is open already.
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        # `beside` is the descriptor of a folder, or -1.
        if isinstance(beside, int) and beside >= 0:
            name = os.path.join(f"/dev/fd/{beside}", name)
        if event == "os.mkdir" and os.path.isdir(name):
            return
        # A device, such as /dev/null, is no file.
        if event == "open" and os.path.exists(name) and not os.path.isfile(name):
            return
        # A link is changed where it lies; what is opened, where it leads.
        parent = Path(os.path.realpath(os.path.dirname(os.path.abspath(name))))
        if event == "open":
            parent = Path(os.path.realpath(name))
        inside = any(parent.is_relative_to(folder) for folder in folders)
        if not inside and "__pycache__" not in parent.parts:
            refuse(f"write, make or remove {os.fsdecode(path)}")

    _tell_of_writing()
    sys.addaudithook(check)


def _tell_of_writing() -> None:
    """Make `torch.save` and `h5py.File`, which write in C, say what they open, as Python's own `open` does."""
    save = torch.save
    init = h5py.File.__init__

    def tell(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            sys.audit("open", path, "w", os.O_WRONLY)

    @functools.wraps(save)
    def telling_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        tell(f)
        save(obj, f, *args, **kwargs)

    @functools.wraps(init)
    def telling_init(file: h5py.File, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        if mode != "r":
            tell(name)
        init(file, name, mode, *args, **kwargs)

    torch.save = telling_save
    h5py.File.__init__ = telling_init
