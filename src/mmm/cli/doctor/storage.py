"""Where files lie: the environment's and the runs' file systems, their free space, and a home to keep caches in."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmm.cli.doctor.finding import Finding, Place
from mmm.units import GIB

# A thousand ranks that import from one of these ask one server for ten thousand files each.
PARALLEL = ("lustre", "gpfs", "beegfs", "panfs", "ceph", "daos", "fuse.daos", "fuse.dfuse", "wekafs", "pvfs2")
SHARED = (*PARALLEL, "nfs", "nfs4", "afs", "cifs", "smb3", "fuse.sshfs", "glusterfs", "fuse.glusterfs")
MEMORY = ("tmpfs", "ramfs")
SPREAD = "spread those of gigabytes before they are written, lfs setstripe -c 8"
LEAST_FREE = 1 * GIB


def file_system(path: Path, root: Path = Path("/")) -> tuple[str, str]:
    """The type of the file system that holds `path`, and where that is mounted; by the kernel's list of mounts.

    ("unknown", "") where there is no such list.
    """
    try:
        text = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return "unknown", ""
    where = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = point == "/" or where == point or where.startswith(point + "/")
        if inside and len(point) >= len(best):  # of mounts at one place, the last one counts
            best, kind = point, after.split()[0]
    return kind, best


def check_environment(place: Place) -> Iterator[Finding]:
    """The file system of the (virtual) environment, from which every rank imports."""
    kind, point = file_system(place.prefix, place.root)
    seen = f"{place.prefix} on {kind}" + (f" ({point})" if point else "")
    if kind in SHARED:
        yield Finding(
            "venv",
            "warn",
            seen,
            "every rank that imports asks its server for thousands of files: copy the "
            "environment to node-local disk, or let one process a host import (`launch`; on a cluster "
            "`launch --ranks-by host`)",
        )
    else:
        yield Finding("venv", "ok", seen)


def check_outdir(place: Place) -> Iterator[Finding]:
    """Where runs write: the folder, or the nearest above it that exists. Written to for a try."""
    folder = place.outdir.absolute()
    there = next(each for each in [folder, *folder.parents] if each.exists())
    kind, point = file_system(there, place.root)
    seen = f"{folder} on {kind}" + (f" ({point})" if point else "")
    if not there.is_dir():
        yield Finding("outdir", "fail", f"{there} is a file", "give another --outdir")
        return
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"mmm")
            file.flush()
    except OSError as error:
        why = "read-only" if error.errno == errno.EROFS else error.strerror
        yield Finding(
            "outdir", "fail", f"{seen}: cannot be written: {why}", "give runs an --outdir that can be, on scratch say"
        )
        return
    if kind in MEMORY:
        yield Finding(
            "outdir",
            "warn",
            seen,
            "files are gone when the node restarts, and count as memory: give an --outdir on a disk",
        )
    elif kind in SHARED and kind not in PARALLEL:
        yield Finding("outdir", "ok", seen, "fine for a record; large checkpoints want a parallel file system")
    else:
        yield Finding("outdir", "ok", seen)
    yield from check_space("free disk", there, place)


def check_striping(place: Place) -> Iterator[Finding]:
    """On Lustre, over how many targets a new file is spread: where runs write, and where data sets are."""
    given = place.environ.get("MMM_DATA")
    for name, folder in (("striping", place.outdir), ("striping, data", Path(given) if given else None)):
        there = folder and next(each for each in [folder.absolute(), *folder.absolute().parents] if each.exists())
        if there is None or file_system(there, place.root)[0] != "lustre":
            continue
        count = stripe_count(there, place.environ.get("PATH", ""))
        seen = f"new files in {there}: " + ("unknown, lfs does not say" if count is None else stripes(count))
        yield Finding(name, "ok", seen, f"files that all ranks read: {SPREAD} {there}" if count in (None, 1) else "")


def stripe_count(folder: Path, path: str) -> int | None:
    """The stripes of a new file in a folder on Lustre; -1: over all targets; None where Lustre's `lfs` does not say.

    Of a layout that grows with the file (PFL) it is that of its last part.
    """
    lfs = shutil.which("lfs", path=path)
    if lfs is None:
        return None
    asked = subprocess.run([lfs, "getstripe", "-d", "-c", str(folder)], capture_output=True, text=True, check=False)
    found = re.findall(r"(?:^|\s)(-?[0-9]+)\s*$", asked.stdout, re.MULTILINE)
    return int(found[-1]) or 1 if asked.returncode == 0 and found else None  # 0: the file system's usual number, 1


def stripes(count: int) -> str:
    return "over all targets" if count < 0 else f"{count} stripe{'s' * (count != 1)}, so as many targets"


def check_space(name: str, folder: Path, place: Place) -> Iterator[Finding]:
    """The free space where `folder` is. Quotas are not seen."""
    free = shutil.disk_usage(folder).free
    seen = f"{free / GIB:,.1f} GiB free at {folder}"
    if free < LEAST_FREE:
        yield Finding(name, "warn", seen, "a run that meets a full disk ends: free some, or give another --outdir")
    else:
        yield Finding(name, "ok", seen)


def check_home(place: Place) -> Iterator[Finding]:
    """A home folder that can be written: torch, matplotlib and mmm keep caches there."""
    home = place.environ.get("HOME", "")
    cure = "set HOME, or XDG_CACHE_HOME, MPLCONFIGDIR and TORCH_HOME, to a folder that can be written"
    if not home:
        yield Finding("home", "warn", "HOME is not set", cure)
    elif not Path(home).is_dir():
        yield Finding("home", "warn", f"HOME={home} is not a folder", cure)
    else:
        try:
            with tempfile.TemporaryFile(dir=home):
                pass
        except OSError as error:
            yield Finding("home", "warn", f"HOME={home} cannot be written: {error.strerror}", cure)
        else:
            kind, _ = file_system(Path(home), place.root)
            yield Finding("home", "ok", f"{home} on {kind}")
