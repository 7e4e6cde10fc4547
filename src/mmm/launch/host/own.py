"""Folders in places where every user of a host can write: opened only if they are this user's own."""

import os

OTHERS_WRITE = 0o022


def open_own(path: str | os.PathLike[str]) -> int:
    """A descriptor of the folder `path`, which is this user's, and which nobody else can write to.

    Raises:
        OSError: it is not there, or it is a link, a FIFO, a file. PermissionError: it is somebody else's, or others can
            write to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(descriptor)
    if info.st_uid == os.geteuid() and not info.st_mode & OTHERS_WRITE:
        return descriptor
    os.close(descriptor)
    reason = "others can write to it" if info.st_uid == os.geteuid() else "it belongs to somebody else"
    raise PermissionError(1, reason, os.fspath(path))
