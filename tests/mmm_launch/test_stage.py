"""`launch --stage`: several agents on this machine stand for hosts, each with a temporary folder of its own. Nothing
that another user of the host has put there is run, followed, removed or waited for."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import mmm
import mmm_launch
from mmm_launch.errors import LaunchError
from mmm_launch.host import stage as stages
from mmm_launch.host.stage import own_folder, packed, unpack
from mmm_launch.spec import stage
from mmm_launch.spec.stage import Stage
from support.clock import PATIENCE
from support.disk import CAN_MOUNT, small_disk

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


# An mpiexec that runs all hosts' agents on this one, each with a temporary folder of its own.
MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys, time
words = sys.argv[1:]
if words == ["--version"]: sys.exit(print("HYDRA build details:"))
count = int(words[words.index("-n") + 1])
command = words[words.index(next(w for w in words if w.endswith("python"))):]
def rank(number):
    host = f"h{{number}}"
    place = {{"PMI_RANK": str(number), "PMI_SIZE": str(count)}}
    time.sleep(number * float(os.environ.get("APART", "0")))
    return os.environ | place | {{"SLURMD_NODENAME": host, "TMPDIR": os.path.abspath(host)}}
sys.exit(max(p.wait() for p in [subprocess.Popen(command, env=rank(number)) for number in range(count)]))
"""
# One write a line: lines of several ranks do not mix.
WHERE = """import mmm, os, sys
sys.stdout.write(' '.join([os.environ['RANK'], sys.prefix, mmm.__file__, os.environ['MMM_STAGED']]) + '\\n')"""


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A virtual environment with mmm in it, and with nothing else."""
    folder = tmp_path_factory.mktemp("stage") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for package in (mmm, mmm_launch):
        source = Path(package.__file__).parent
        shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(autouse=True)
def no_other_source(monkeypatch):
    """Ranks import from the environment that they run in."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


class Hosts:
    """Hosts h0, h1, …: folders of those names under the launcher's."""

    def __init__(self, launcher, pristine, count):
        self.launcher, self.count = launcher, count
        self.env = launcher.folder / "env"
        shutil.copytree(pristine, self.env, symlinks=True)
        launcher.write("mpiexec", MPIEXEC).chmod(0o755)
        for index in range(count):
            (launcher.folder / f"h{index}").mkdir()

    def options(self, *command, ranks_per_host=1, source="env"):
        names = ",".join(f"h{index}" for index in range(self.count))
        cluster = ["--scheduler", "none", "--hosts", names, "-ppn", str(ranks_per_host), "--mpiexec", "./mpiexec"]
        return [*cluster, "--device", "cpu", "--stage", source, *command]

    def variables(self):
        return {"MMM_LAUNCH_ADDRESS": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *argv, **options):
        return self.launcher.start(*self.options(*argv, **options), **self.variables())

    def run(self, *argv, ranks_per_host=1, source="env", **variables):
        return self.launcher.run(
            *self.options(*argv, ranks_per_host=ranks_per_host, source=source), **self.variables(), **variables
        )

    def left(self):
        """What lies in the hosts' temporary folders, and the archive."""
        folder = self.launcher.folder
        return sorted(str(p.relative_to(folder)) for p in [*folder.glob("h*/mmm-stage-*/*"), *folder.glob(".mmm-*")])


@pytest.fixture
def hosts(launcher, pristine):
    return lambda count: Hosts(launcher, pristine, count)


@pytest.mark.parametrize("ranks_per_host", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_host_runs_from_its_own_copy(hosts, ranks_per_host):
    made = hosts(3)
    done = made.run("python3", "-c", WHERE, ranks_per_host=ranks_per_host)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert len(lines) == 3 * ranks_per_host
    for rank, prefix, package, staged in lines:
        assert Path(prefix).parents[2] == made.launcher.folder / f"h{int(rank) // ranks_per_host}"
        assert package.startswith(prefix + "/lib/")
        assert staged == prefix
    assert made.left() == []
    assert made.launcher.gone(within=2)


@pytest.mark.long
def test_scripts_and_paths_name_the_copy(hosts):
    """Scripts that installers have written name the copy, and the copy's programs come first."""
    made = hosts(1)
    env = made.env
    (env / "bin/tool").write_text(f"#!{env}/bin/python\nimport sys; sys.stdout.write(sys.prefix + chr(10))\n")
    (env / "bin/tool").chmod(0o755)
    (env / "more").mkdir()
    next(env.glob("lib/python*/site-packages")).joinpath("own.pth").write_text(f"{env}/more\n")
    path = {"PATH": f"{env}/bin:{os.environ['PATH']}"}
    disk = made.launcher.folder / "h0"
    done = made.run("tool", ranks_per_host=2, **path)
    assert done.returncode == 0, done.stderr
    assert [Path(line).parents[2] for line in done.stdout.split()] == [disk] * 2
    code = "import os, shutil, sys; print(shutil.which('tool'), *[p for p in sys.path if p.endswith('more')])"
    done = made.run("python3", "-c", code, **path)
    assert done.returncode == 0, done.stderr
    tool, more = done.stdout.split()
    assert Path(tool).parent.parent == Path(more).parent
    assert Path(more).parents[3] == disk
    assert made.run("python3", "-c", "raise SystemExit(3)", **path).returncode == 3
    assert made.left() == []


@pytest.mark.parametrize("top", ["env", pytest.param(".", marks=pytest.mark.long)])
def test_an_archive(hosts, top):
    made = hosts(2)
    with tarfile.open(made.launcher.folder / "env.tar.gz", "w:gz") as tar:
        tar.add(made.env, arcname=top)
    shutil.rmtree(made.env)
    done = made.run("python3", "-c", WHERE, source="env.tar.gz")
    assert done.returncode == 0, done.stderr
    assert {Path(line.split()[3]).is_relative_to(made.launcher.folder) for line in done.stdout.splitlines()} == {True}
    assert made.left() == []
    assert (made.launcher.folder / "env.tar.gz").exists()


@pytest.mark.parametrize("place", ["in a file", "in a header", "between files"])
def test_an_archive_that_is_cut_short(tmp_path, place):
    env = tmp_path / "env"
    env.mkdir()
    for name in ("a", "b"):
        (env / name).write_bytes(bytes(10_000))
    with tarfile.open(tmp_path / "env.tar", "w") as tar:
        tar.add(env, arcname=".")
    with tarfile.open(tmp_path / "env.tar") as tar:
        member = tar.getmember("./b")
    size = {"in a file": member.offset_data + 512, "in a header": member.offset + 100, "between files": member.offset}
    os.truncate(tmp_path / "env.tar", size[place])
    source = Stage(str(tmp_path / "env.tar"), str(tmp_path / "disk"))
    with packed(source) as made, pytest.raises(LaunchError, match=r"env\.tar: the archive is cut short"):
        unpack(made)
    assert list((tmp_path / "disk").glob("*/*")) == []


def test_an_archive_that_changes_after_launch_has_read_it(source, tmp_path):
    with packed(source) as made:
        with tarfile.open(made.archive, "w") as tar:
            tar.add(__file__, arcname="env/program")
        with pytest.raises(LaunchError, match="sha256"):
            unpack(made)
    assert list(Path(source.to).glob("*/*")) == []


def test_one_host_cannot_and_all_end(hosts):
    made = hosts(3)
    (made.launcher.folder / "h2" / f"mmm-stage-{os.getuid()}").write_text("not a folder")
    done = made.run("python3", "-c", WHERE)
    assert done.returncode == 2
    assert f"{made.launcher.folder}/h2/mmm-stage-{os.getuid()}: File exists (--stage-to" in done.stderr
    assert done.stderr.count("(on h2)") == done.stderr.count("--stage-to") == 1
    assert made.left() == []
    assert done.stdout == ""


def test_a_host_that_fails_later_than_another_is_not_waited_for(hosts):
    made = hosts(2)
    shutil.rmtree(next(made.env.glob("lib/python*/site-packages/mmm_launch")))
    began = time.monotonic()
    done = made.run("python3", "-c", WHERE, APART="3")
    assert done.returncode == 2
    assert done.stderr.count("ModuleNotFoundError: No module named 'mmm_launch'") == 1
    assert time.monotonic() - began < 40
    assert made.left() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_launch_is_told_to_end_while_hosts_unpack(hosts, signum):
    made = hosts(2)
    with (made.env / "large").open("wb") as file:
        file.truncate(200_000_000)
    process = made.start("python3", "-c", WHERE)
    deadline = time.monotonic() + PATIENCE
    while not list((made.launcher.folder / "h1").glob("mmm-stage-*/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (128 + signum, ""), err
    assert made.launcher.gone(within=5)
    assert made.left() == []


@pytest.mark.long
def test_launch_is_killed_while_ranks_run(hosts):
    made = hosts(2)
    process = made.start("python3", "-c", "import time; open('began', 'a').write('x'); time.sleep(600)")
    made.launcher.wait_for("began")
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert made.launcher.gone(within=10)
    assert [name for name in made.left() if not name.startswith(".mmm-stage-")] == []


@pytest.mark.long
def test_an_attempt_after_a_failure_has_its_copy_too(hosts):
    made = hosts(2)
    code = "import os, sys; sys.exit(os.environ['MMM_ATTEMPT'] < '1' or 'MMM_STAGED' not in os.environ)"
    done = made.run("--retries", "1", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is packed") == 1
    assert made.left() == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--stage", "none"], "--stage"),
        (["--stage", "file"], "--stage"),
        (["--stage-to", "/tmp"], "--stage-to"),
        (["--stage", ".", "--stage-to", "here"], "--stage-to"),
    ],
)
def test_options_that_are_wrong(launcher, argv, says):
    launcher.write("file", "no archive")
    done = launcher.run(*launcher.on_hosts(), *argv, "python3", "-c", "1")
    assert done.returncode == 2
    assert says in done.stderr


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder with a file, in a working folder; copies go to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "f").write_text("ours")
    (tmp_path / "env" / "link").symlink_to("f")
    (tmp_path / "env" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "env" / "run").chmod(0o750)
    os.link(tmp_path / "env" / "f", tmp_path / "env" / "same")
    return Stage(str(tmp_path / "env"), str(tmp_path / "disk"))


def test_what_is_unpacked_is_what_was_packed(source):
    with packed(source) as made:
        copy = unpack(made)
        path = Path(copy.path)
        assert {p.name for p in path.iterdir()} == {"f", "link", "run", "same"}
        assert path.joinpath("f").read_text() == "ours"
        assert os.readlink(path / "link") == "f"
        assert path.joinpath("run").stat().st_mode & 0o777 == 0o750
        assert os.path.samefile(path / "f", path / "same")
        copy.remove()
    assert sorted(os.listdir()) == ["disk", "env"]


def test_a_run_removes_what_a_killed_one_has_left_and_not_what_another_uses(source):
    with packed(source) as killed, packed(source) as other, packed(source) as made:
        pid = os.fork()
        if pid == 0:
            unpack(killed)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        used = unpack(other)
        copy = unpack(made)
        left = set(Path(source.to).glob("*/*"))
        assert left == {used.folder, copy.folder}
        used.remove()
        copy.remove()


def test_a_signal_while_the_copys_folder_is_made_leaves_no_folder(source, monkeypatch):
    """`launch` that is told to end at once: the folder is there, and nobody has its name yet."""

    def ended(descriptor, operation):
        # The first lock is that of the folder above.
        if list(Path(source.to).glob("*/*")):
            raise SystemExit(128 + signal.SIGINT)

    with packed(source) as made:
        monkeypatch.setattr(stages.fcntl, "flock", ended)
        with pytest.raises(SystemExit):
            unpack(made)
    assert list(Path(source.to).glob("*/*")) == []


@CAN_MOUNT
@pytest.mark.parametrize("folder", ["work", "disk"])
def test_a_disk_that_is_full_is_named(source, monkeypatch, folder):
    """The error was "No space left on device", of one of two folders on one of many hosts."""
    (Path(source.source) / "large").write_bytes(bytes(2**21))
    for name in ("work", "disk"):
        Path(name).mkdir()
    full = Path(folder).absolute()
    with small_disk(full, "size=1m"), monkeypatch.context() as patch:
        patch.chdir("work")
        refused = pytest.raises(LaunchError, match=rf"No space left on device: {full} has [01]\.. MB left")
        with refused, packed(source) as made:
            unpack(made)


def test_a_fifo_is_no_part_of_an_environment(source):
    os.mkfifo(Path(source.source) / "pipe")
    with packed(source) as made, pytest.raises(LaunchError, match="env/pipe is a FIFO or a device"):
        unpack(made)
    assert sorted(os.listdir()) == ["disk", "env"]
    assert list(Path(source.to).glob("*/*")) == []


def test_variables_that_name_the_source():
    environ = {"PATH": "/x/env/bin:/usr/bin", "PYTHONPATH": "/x/env/lib:/x/environment", "HOME": "/x/env"}
    changed = stage.environment(environ, "/x/env", "/tmp/c")
    assert changed == {"MMM_STAGED": "/tmp/c", "PATH": "/tmp/c/bin:/usr/bin", "PYTHONPATH": "/tmp/c/lib:/x/environment"}


@pytest.fixture
def environment(tmp_path, monkeypatch):
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


def plant(way, place, elsewhere):
    """As another user: a folder, an archive, a link to `elsewhere`, or a FIFO."""

    def work():
        if way == "FIFO":
            os.mkfifo(place)
        elif way == "link":
            place.symlink_to(elsewhere)
        elif way == "folder":
            place.mkdir()
        else:
            place.write_bytes(elsewhere.read_bytes())

    as_a_stranger(work)


@pytest.mark.parametrize("way", ["folder", "link", "FIFO"])
def test_a_planted_folder_is_refused(environment, everybodys, way):
    (everybodys / "elsewhere").mkdir()
    plant(way, everybodys / f"mmm-stage-{os.getuid()}", everybodys / "elsewhere")
    why = {"folder": "it belongs to somebody else", "link": "Not a directory", "FIFO": "File exists"}[way]
    with packed(Stage(str(environment), str(everybodys))) as made, pytest.raises(LaunchError, match=why):
        unpack(made)


@pytest.mark.parametrize("way", ["archive", "link", "FIFO"])
def test_a_planted_archive_is_refused(environment, everybodys, tmp_path, way):
    """Somebody else has put it at the archive's place, and knows its sha256."""
    planted = everybodys / "env.tar"
    with packed(Stage(str(environment), str(tmp_path / "disk"))) as made:
        (everybodys / "copy").write_bytes(Path(made.archive).read_bytes())
        plant(way, planted, everybodys / "copy")
        reasons = {
            "archive": "it belongs to somebody else",
            "link": "symbolic links",
            "FIFO": "it is not a regular file",
        }
        with pytest.raises(LaunchError, match=reasons[way]):
            unpack(replace(made, archive=str(planted)))
    assert list((tmp_path / "disk").glob("*/*")) == []


def test_an_archive_that_others_can_write_to_is_refused(environment, tmp_path):
    with packed(Stage(str(environment), str(tmp_path / "disk"))) as made:
        assert os.stat(made.archive).st_mode & 0o777 == 0o600
        os.chmod(made.archive, 0o620)
        with pytest.raises(LaunchError, match="others can write to it"):
            unpack(made)


def test_what_somebody_else_has_planted_is_refused_before_anything_starts(launcher, everybodys):
    with tarfile.open(launcher.folder / "own.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("env/program"))
    (everybodys / "own.tar").write_bytes((launcher.folder / "own.tar").read_bytes())
    plant("archive", everybodys / "env.tar", everybodys / "own.tar")
    (launcher.folder / "env").mkdir()
    plant("folder", everybodys / f"mmm-stage-{os.getuid()}", None)
    for argv, says in (
        (["--stage", str(everybodys / "env.tar")], "it belongs to somebody else"),
        (["--stage", "env", "--stage-to", str(everybodys)], "it belongs to somebody else (--stage-to names another)"),
    ):
        done = launcher.run(*launcher.on_hosts(), "-n", "2", *argv, "python3", "-c", "print('ran')")
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_new_folder_is_this_users_alone(environment, tmp_path):
    before = os.umask(0)
    try:
        parent = own_folder(str(tmp_path))
    finally:
        os.umask(before)
    assert parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(everybodys):
    parent = own_folder(str(everybodys))
    parent.chmod(0o777)
    with pytest.raises(LaunchError, match="others can write to it"):
        own_folder(str(everybodys))
    parent.chmod(0o700)
    everybodys.chmod(0o777)
    with pytest.raises(LaunchError, match="anybody can replace what is in it"):
        own_folder(str(everybodys))


def test_what_is_unpacked_is_this_users(environment, tmp_path):
    os.chown(environment / "program", 54321, 54321) if os.geteuid() == 0 else None
    with packed(Stage(str(environment), str(tmp_path / "t"))) as made:
        copy = unpack(made)
        assert {path.stat().st_uid for path in (Path(copy.path), Path(copy.path) / "program")} == {os.getuid()}
        copy.remove()
