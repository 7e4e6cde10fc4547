"""Another user of this host, who can do what the system lets another user do."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

UID = 54321


def as_a_stranger(work):
    """Call `work()` in a process of another user; it needs root to become one."""
    if os.geteuid() != 0:
        pytest.skip("another user's files can be made by root alone")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            os.umask(0)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def shared_folder():
    """One as /tmp is: everybody writes there, and nobody removes what is another's. Pytest's own let nobody in."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        folder.chmod(0o1777)
        yield folder
