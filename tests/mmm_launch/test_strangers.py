"""What another user of the host has put where launch looks: nothing of it is run, followed, removed or waited for."""

import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.host.stage import own_folder, packed, unpack
from mmm_launch.spec.stage import Stage
from support.stranger import as_a_stranger, shared_folder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """An environment, and the working folder that its archive is written into."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "program").write_text("ours")
    return folder


@pytest.fixture
def everybodys():
    with shared_folder() as folder:
        yield folder


@pytest.mark.parametrize("way", ["folder", "link to a folder", "FIFO"])
def test_a_planted_folder_is_refused(source, everybodys, way):
    parent = everybodys / f"mmm-stage-{os.getuid()}"

    def plant():
        if way == "FIFO":
            os.mkfifo(parent)
        elif way == "folder":
            parent.mkdir()
        else:
            (everybodys / "elsewhere").mkdir()
            parent.symlink_to(everybodys / "elsewhere")

    as_a_stranger(plant)
    why = {"folder": "it belongs to somebody else", "link to a folder": "Not a directory", "FIFO": "File exists"}[way]
    with packed(Stage(str(source), str(everybodys))) as made, pytest.raises(LaunchError, match=why):
        unpack(made)


@pytest.mark.parametrize("way", ["archive", "link", "FIFO"])
def test_a_planted_archive_is_refused(source, everybodys, tmp_path, way):
    """Somebody else has put it at the archive's place, and knows its sha256."""
    planted = everybodys / "env.tar"
    with packed(Stage(str(source), str(tmp_path / "disk"))) as made:
        (everybodys / "copy").write_bytes(Path(made.archive).read_bytes())

        def plant():
            if way == "FIFO":
                os.mkfifo(planted)
            elif way == "archive":
                planted.write_bytes((everybodys / "copy").read_bytes())
            else:
                planted.symlink_to(everybodys / "copy")

        as_a_stranger(plant)
        why = {"archive": "it belongs to somebody else", "link": "symbolic links", "FIFO": "it is no regular file"}[way]
        with pytest.raises(LaunchError, match=why):
            unpack(replace(made, archive=str(planted)))
    assert list((tmp_path / "disk").glob("*/*")) == []


def test_an_archive_that_others_can_write_to_is_refused(source, tmp_path):
    with packed(Stage(str(source), str(tmp_path / "disk"))) as made:
        assert os.stat(made.archive).st_mode & 0o777 == 0o600
        os.chmod(made.archive, 0o620)
        with pytest.raises(LaunchError, match="others can write to it"):
            unpack(made)


def test_the_archive_of_somebody_else_is_refused_before_anything_starts(launcher, everybodys):
    def plant():
        with tarfile.open(everybodys / "env.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("env/program"))

    as_a_stranger(plant)
    stage = str(everybodys / "env.tar")
    done = launcher.run(*launcher.on_hosts(), "-n", "2", "--stage", stage, "python3", "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "it belongs to somebody else" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_new_folder_is_this_users_alone(source, tmp_path):
    before = os.umask(0)
    try:
        parent = own_folder(str(tmp_path))
    finally:
        os.umask(before)
    assert parent.stat().st_mode & 0o777 == 0o700


def test_launch_names_the_planted_folder_and_starts_nothing(launcher, everybodys):
    (launcher.folder / "env").mkdir()
    as_a_stranger((everybodys / f"mmm-stage-{os.getuid()}").mkdir)
    words = ["-n", "2", "--stage", "env", "--stage-to", str(everybodys)]
    done = launcher.run(*launcher.on_hosts(), *words, "python3", "-c", "print('ran')")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "it belongs to somebody else (--stage-to names another)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_others_can_write_to_is_refused(everybodys):
    parent = own_folder(str(everybodys))
    parent.chmod(0o777)
    with pytest.raises(LaunchError, match="others can write to it"):
        own_folder(str(everybodys))
    parent.chmod(0o700)
    everybodys.chmod(0o777)
    with pytest.raises(LaunchError, match="anybody can replace what is in it"):
        own_folder(str(everybodys))


def test_what_is_unpacked_is_this_users(source, tmp_path):
    os.chown(source / "program", 54321, 54321) if os.geteuid() == 0 else None
    with packed(Stage(str(source), str(tmp_path / "t"))) as made:
        copy = unpack(made)
        assert {each.stat().st_uid for each in (Path(copy.path), Path(copy.path) / "program")} == {os.getuid()}
        copy.remove()
