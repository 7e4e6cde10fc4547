"""What another user of the host has put where launch looks: nothing of it is run, followed, removed or waited for."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from mmm.launch.errors import LaunchError
from mmm.launch.plan.stage import Stage
from mmm.launch.staging import copy as copies
from mmm.launch.staging import host
from mmm.launch.staging.copy import MARK, Copy
from mmm.outside import open_own
from support.stranger import as_a_stranger, shared_folder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "program").write_text("ours")
    return folder


@pytest.fixture
def everybodys():
    with shared_folder() as folder:
        yield folder


def planted(copy, at):
    """A copy that looks complete, of a source that this user has, at the place where launch will look for it."""
    at.mkdir(parents=True)
    (at / "program").write_text("evil")
    (at / MARK).write_text(json.dumps({"contents": copies._contents(at), "source": copy.source.path}))


@pytest.mark.parametrize("way", ["folder", "link to a folder", "FIFO"])
def test_a_planted_copy_is_refused(source, everybodys, way):
    copy = Copy(copies.scan(str(source)), str(everybodys))

    def plant():
        if way == "FIFO":
            os.mkfifo(copy.parent)
        elif way == "folder":
            planted(copy, copy.path)
        else:
            planted(copy, everybodys / "elsewhere" / copy.path.name)
            copy.parent.symlink_to(everybodys / "elsewhere")

    as_a_stranger(plant)
    why = {"folder": "it belongs to somebody else", "link to a folder": "Not a directory", "FIFO": "File exists"}[way]
    with (
        pytest.raises(LaunchError, match=f"mmm-stage-0: {why} .--stage-to"),
        host.on_this_host(Stage(str(source), str(everybodys))),
    ):
        pass


def test_a_new_folder_is_this_users_alone(source, tmp_path):
    copy, before = Copy(copies.scan(str(source)), str(tmp_path)), os.umask(0)
    try:
        copy.own_folder()
    finally:
        os.umask(before)
    assert copy.parent.stat().st_mode & 0o777 == 0o700


def test_launch_names_the_planted_folder_and_starts_nothing(launcher, everybodys):
    (launcher.folder / "env").mkdir()
    as_a_stranger((everybodys / f"mmm-stage-{os.getuid()}").mkdir)
    done = launcher.run(
        "-n", "2", "--device", "cpu", "--stage", "env", "--stage-to", str(everybodys), "python3", "-c", "print('ran')"
    )
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "it belongs to somebody else (--stage-to names another)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_others_can_write_to_is_refused(source, everybodys):
    copy = Copy(copies.scan(str(source)), str(everybodys))
    copy.parent.mkdir()
    copy.parent.chmod(0o777)
    with pytest.raises(LaunchError, match="others can write to it"):
        copy.own_folder()
    copy.parent.chmod(0o700)
    everybodys.chmod(0o777)
    with pytest.raises(LaunchError, match="anybody can replace what is in it"):
        copy.own_folder()


@pytest.mark.parametrize("mark", ["null", "[1]", '"contents"', "7", "[" * 100_000, "", "\udcff"])
def test_a_mark_that_is_none_costs_the_copy(source, tmp_path, mark):
    found = Stage(str(source), str(tmp_path / "t"), keep=True)
    with host.on_this_host(found) as path:
        pass
    (Path(path) / MARK).write_text(mark, errors="surrogateescape")
    (Path(path) / "program").write_text("changed")
    for name in ("x", "99999999999999999999", "-1"):  # odd names beside it
        (Path(path).parent / f".{Path(path).name}.{os.uname().nodename}.{name}").mkdir()
    with host.on_this_host(found) as path:
        assert (Path(path) / "program").read_text() == "ours"


def test_a_mark_that_never_ends_is_not_read(source, tmp_path):
    copy = Copy(copies.scan(str(source)), str(tmp_path / "t"))
    with host.on_this_host(Stage(str(source), str(tmp_path / "t"), keep=True)):
        pass
    assert copy.is_there()
    (copy.path / MARK).unlink()
    (copy.path / MARK).symlink_to("/dev/zero")
    assert not Copy(copy.source, str(tmp_path / "t")).is_there()


def test_what_is_unpacked_is_this_users(source, tmp_path):
    os.chown(source / "program", 54321, 54321) if os.geteuid() == 0 else None
    with host.on_this_host(Stage(str(source), str(tmp_path / "t"))) as path:
        assert {each.stat().st_uid for each in (Path(path), Path(path) / "program")} == {os.getuid()}


def test_a_copy_that_is_being_removed_is_not_waited_for(source, tmp_path):
    copy = Copy(copies.scan(str(source)), str(tmp_path / "t"))
    copy.own_folder()
    copy.make_room()
    copy.make(copies.pack(copy.source))
    os.close(copy.lock)
    copy.lock = None
    remover = open_own(copy.path)
    fcntl.flock(remover, fcntl.LOCK_EX)
    assert not copy.is_there()
    os.close(remover)
    assert copy.is_there()
