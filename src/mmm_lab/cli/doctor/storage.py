"""Is the folder that runs write to fit: can it be written, on which file system is it, how much is free there?"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmm.units import GIB
from mmm_lab.cli.doctor.finding import Finding

ONE_SERVER = ("nfs", "nfs4", "afs", "cifs", "smb3", "fuse.sshfs")
MEMORY = ("tmpfs", "ramfs")
SPREAD = "spread those of gigabytes before they are written, lfs setstripe -c 8"
LEAST_FREE = 1 * GIB


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, by `df`. "unknown" where `df` does not say it."""
    done = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=False)
    # The first line is a heading.
    return done.stdout.rpartition("\n")[0].rpartition("\n")[2] or "unknown"


def check_outdir(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Look at the folder that runs write to, or the nearest above it that exists, and try to write there."""
    existing = outdir.absolute()
    while not existing.exists():
        existing = existing.parent
    kind = file_system(existing)
    seen = f"{outdir.absolute()} on {kind}"
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
    # Quotas are not seen.
    free = shutil.disk_usage(existing).free
    seen = f"{free / GIB:,.1f} GiB free at {existing}"
    if free < LEAST_FREE:
        advice = "a run that meets a full disk ends: free some, or give another --outdir"
        yield Finding("free disk", "warn", seen, advice)
    else:
        yield Finding("free disk", "ok", seen)
    if kind == "lustre":
        yield _striping(existing)


def _striping(folder: Path) -> Finding:
    """On Lustre, say over how many targets a new file is spread."""
    count = stripe_count(folder)
    advice = ""
    # All ranks would read from one target.
    if count in (None, 1):
        advice = f"files that all ranks read: {SPREAD} {folder}"
    stripes = f"{count} stripes"
    if count is None:
        stripes = "lfs does not say over how many targets"
    elif count < 0:
        stripes = "over all targets"
    return Finding("striping", "ok", f"new files in {folder}: {stripes}", advice)


def stripe_count(folder: Path) -> int | None:
    """Returns the stripes of a new file in a folder on Lustre. −1: over all targets. None: `lfs` does not say.

    A layout may grow with the file (PFL): then it is the number of its last section.
    """
    if shutil.which("lfs") is None:
        return None
    done = subprocess.run(["lfs", "getstripe", "-d", "-c", str(folder)], capture_output=True, text=True, check=False)
    last = re.search(r"(?:^|\s)(-?[0-9]+)\s*$", done.stdout)
    if done.returncode or last is None:
        return None
    # 0 means the file system's usual number, which is 1.
    return int(last[1]) or 1
