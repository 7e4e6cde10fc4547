"""The git repository that a program's file is in: which commit, and whether files differ from it.

git is asked once, without a shell and without the hooks that a repository may bring along, and is not waited for long.
Where there is no git, or no repository, nothing is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mmm.units import counted

LONGEST_WAIT = 2.0  # s
STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all")
# A repository's own settings may name a program to start: a monitor of its files.
SAFE = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


def repository_of(file: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """What a run's record says of the repository.

    Args:
        file: the program's; None for one without, such as of ``python3 -c``, whose folder is the current one.

    Returns:
        ``folder``, ``commit`` (its full hash; None before the first), ``branch`` (None where there is none), and
        ``changed``, the number of files that differ from the commit, without those that git does not know. Where git
        fails, ``folder`` and ``problem``. None without git or a repository.
    """
    start = Path(file).absolute().parent if file else Path.cwd()
    folder = next((place for place in (start, *start.parents) if (place / ".git").exists()), None)
    git = shutil.which("git")
    if folder is None or git is None:
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
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
    facts: dict[str, Any] = {"folder": str(folder), "commit": None, "branch": None, "changed": 0}
    for line in status.decode(errors="replace").splitlines():
        mark, _, text = line.partition(" ")
        if mark != "#":
            facts["changed"] += 1
        name, _, value = text.partition(" ")
        if name == "branch.oid" and value != "(initial)":
            facts["commit"] = value
        if name == "branch.head" and value != "(detached)":
            facts["branch"] = value
    return facts


def commit_text(repository: Any) -> str | None:
    """As ``1e1563faabc1``, and ``+ 2 changed files`` where they are. None where the record does not say."""
    commit = repository.get("commit") if isinstance(repository, dict) else None
    if not isinstance(commit, str):
        return None
    text = commit[:12]
    changed = repository.get("changed")
    if isinstance(changed, int) and changed > 0:
        text += f" + {counted(changed, 'changed file')}"
    return text
