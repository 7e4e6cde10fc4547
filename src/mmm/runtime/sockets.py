"""Where Python's multiprocessing makes its unix sockets, which data loaders' workers hand over their batches by."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util

LONGEST = 103  # bytes of a socket's path: 107 on Linux (unix(7)), 103 on macOS
BELOW = len("/pymp-01234567/listener-01234567")
FOLDERS = ("/tmp", "/var/tmp")


def use_short_socket_folder() -> str | None:
    """Have the sockets of this process and its children made in a folder whose name is short enough.

    They are made two levels below TMPDIR, and a launcher's TMPDIR for a job can leave too little of a path for that.

    Returns:
        What to tell the user; None where TMPDIR is short, or where there is no other folder.
    """
    asked = tempfile.gettempdir()
    folder = next((name for name in FOLDERS if os.access(name, os.W_OK | os.X_OK)), None)
    if len(os.fsencode(asked)) + BELOW <= LONGEST or folder is None:
        return None
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        made = util.get_temp_dir()  # multiprocessing keeps it, hands it to its children, and removes it at the end
    finally:
        tempfile.tempdir = before
    return f"unix sockets are in {made}: TMPDIR has {len(os.fsencode(asked))} bytes, too long for a socket's path"
