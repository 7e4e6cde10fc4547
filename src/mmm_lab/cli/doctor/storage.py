"""Is the folder that runs write to fit: can it be written, on which file system is it, how much is free there?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmm.units import GIB
from mmm_lab.cli.doctor.finding import Finding, Place

ONE_SERVER = ("nfs", "nfs4", "afs", "cifs", "smb3", "fuse.sshfs")
MEMORY = ("tmpfs", "ramfs")
SPREAD = "spread those of gigabytes before they are written, lfs setstripe -c 8"
LEAST_FREE = 1 * GIB


def file_system(path: Path, root: Path = Path("/")) -> str:
    """Returns the type of the file system that holds `path`, by the kernel's list of mounts. "unknown" without one."""
    try:
        text = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return "unknown"
    where = os.path.realpath(path)
    kind = "unknown"
    longest = 0
    for line in text.splitlines():
        # id parent major:minor root POINT options … - TYPE source options
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        # The kernel writes a space, a tab and a backslash as octal numbers.
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = point == "/" or where == point or where.startswith(point + "/")
        # The deepest mount counts, and of several at one place the last.
        if inside and len(point) >= longest:
            longest = len(point)
            kind = after.split()[0]
    return kind


def check_outdir(place: Place) -> Iterator[Finding]:
    """Look at the folder that runs write to, or the nearest above it that exists, and try to write there."""
    folder = place.outdir.absolute()
    existing = _existing(folder)
    kind = file_system(existing, place.root)
    seen = f"{folder} on {kind}"
    if not existing.is_dir():
        yield Finding("outdir", "fail", f"{existing} is a file", "give another --outdir")
        return
    # By writing: permissions do not say it on a file server, nor where a quota is used up.
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"mmm")
            file.flush()
    except OSError as error:
        seen = f"{seen}: cannot be written: {error.strerror}"
        yield Finding("outdir", "fail", seen, "give runs an --outdir that can be written, such as one on scratch")
        return
    status = "ok"
    advice = ""
    if kind in MEMORY:
        status = "warn"
        advice = "files are gone when the node restarts, and count as memory: give an --outdir on a disk"
    elif kind in ONE_SERVER:
        advice = "fine for a record; large checkpoints want a parallel file system"
    yield Finding("outdir", status, seen, advice)
    yield from _check_space(existing)


def check_striping(place: Place) -> Iterator[Finding]:
    """On Lustre, say over how many targets a new file is spread where runs write."""
    folder = _existing(place.outdir)
    if file_system(folder, place.root) != "lustre":
        return
    count = stripe_count(folder, place.environ.get("PATH", ""))
    advice = ""
    if count is None:
        stripes = "unknown, lfs does not say"
    elif count < 0:
        stripes = "over all targets"
    elif count == 1:
        stripes = "1 stripe, so on one target"
    else:
        stripes = f"{count} stripes, so on as many targets"
    # All ranks would read from one target.
    if count in (None, 1):
        advice = f"files that all ranks read: {SPREAD} {folder}"
    yield Finding("striping", "ok", f"new files in {folder}: {stripes}", advice)


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def stripe_count(folder: Path, path: str) -> int | None:
    """Returns the stripes of a new file in a folder on Lustre. −1: over all targets. None: `lfs` does not say.

    A layout may grow with the file (PFL): then it is the number of its last section.
    """
    lfs = shutil.which("lfs", path=path)
    if lfs is None:
        return None
    done = subprocess.run([lfs, "getstripe", "-d", "-c", str(folder)], capture_output=True, text=True, check=False)
    last = re.search(r"(?:^|\s)(-?[0-9]+)\s*$", done.stdout)
    if done.returncode or last is None:
        return None
    # 0 means the file system's usual number, which is 1.
    return int(last[1]) or 1


def _check_space(folder: Path) -> Iterator[Finding]:
    """Look at the free space where `folder` is. Quotas are not seen."""
    free = shutil.disk_usage(folder).free
    free_gib = free / GIB
    seen = f"{free_gib:,.1f} GiB free at {folder}"
    if free < LEAST_FREE:
        yield Finding(
            "free disk", "warn", seen, "a run that meets a full disk ends: free some, or give another --outdir"
        )
    else:
        yield Finding("free disk", "ok", seen)
