"""Finds the git repository of a program's file: which commit is checked out, and whether files differ from it.

git is called once, without a shell and without the hooks that a repository may bring along, and only for a short time.
If there is no git, or no repository, nothing is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

# Seconds that git may take.
LONGEST_WAIT = 2.0
STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all")

# A repository's own settings may name programs to start: a monitor of its files, and hooks.
SAFE = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


def repository_of(file: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """Describe the git repository of a program, for a run's record.

    Args:
        file: the program's file; None for a program without one, such as ``python3 -c``, whose folder is the current
            one.

    Returns:
        ``folder``, ``commit`` (its full hash; None before the first commit), ``branch`` (None if no branch is checked
        out), and ``changed``, the number of files that differ from the commit, not counting those that git does not
        track. If git fails, ``folder`` and ``problem``. None without git or a repository.
    """
    start = Path.cwd()
    if file:
        start = Path(file).absolute().parent
    repositories = [folder for folder in (start, *start.parents) if (folder / ".git").exists()]
    git = shutil.which("git")
    if not repositories or git is None:
        return None
    # The innermost: repositories may lie inside one another.
    folder = repositories[0]
    # Variables such as GIT_DIR would name another repository.
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith("GIT_"):
            environment[name] = value
    try:
        status = subprocess.check_output(
            [git, *SAFE, "-C", str(start), *STATUS],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_WAIT,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"folder": str(folder), "problem": str(error)}
    facts: dict[str, Any] = {
        "folder": str(folder),
        "commit": None,
        "branch": None,
        "changed": 0,
    }
    for line in status.decode(errors="replace").splitlines():
        # "# branch.oid <hash>", "# branch.head <branch>", then a line for each file that differs
        mark, _, text = line.partition(" ")
        if mark != "#":
            facts["changed"] += 1
        name, _, value = text.partition(" ")
        if name == "branch.oid" and value != "(initial)":
            facts["commit"] = value
        if name == "branch.head" and value != "(detached)":
            facts["branch"] = value
    return facts
