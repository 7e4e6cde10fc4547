"""`launch --stage`: several agents on this machine stand for hosts, each with a temporary folder of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

import mmm
from mmm.launch.channel.handshake import reach
from mmm.launch.channel.link import Link, Lost
from mmm.launch.errors import LaunchError
from mmm.launch.plan import stage
from mmm.launch.plan.stage import Stage
from mmm.launch.run.one_backend import REMOVAL
from mmm.launch.staging import copy as copies
from mmm.launch.staging import host
from mmm.launch.staging.copy import Copy
from support.clock import PATIENCE

MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]: sys.exit(print("HYDRA build details:"))
count, each = (int(words[words.index(name) + 1]) for name in ("-n", "-ppn"))
command = words[words.index(next(w for w in words if w.endswith("python"))):]
def rank(number):
    host = f"h{{number // each}}"
    place = {{"PMI_RANK": str(number), "PMI_SIZE": str(count), "MPI_LOCALRANKID": str(number % each)}}
    return os.environ | place | {{"SLURMD_NODENAME": host, "TMPDIR": os.path.abspath(host)}}
codes = [p.wait() for p in [subprocess.Popen(command, env=rank(number)) for number in range(count)]]
open("codes", "w").write(" ".join(map(str, codes)))
sys.exit(max(codes))
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
    shutil.copytree(Path(mmm.__file__).parent, packages / "mmm", ignore=shutil.ignore_patterns("__pycache__"))
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
        for number in range(count):
            (launcher.folder / f"h{number}").mkdir()

    def words(self, *words, by="host", each=1, source="env"):
        names = ",".join(f"h{number}" for number in range(self.count))
        cluster = ["--scheduler", "none", "--hosts", names, "-ppn", str(each), "--mpiexec", "./mpiexec"]
        return [*cluster, "--ranks-by", by, "--device", "cpu", "--stage", source, *words]

    def variables(self):
        return {"MMM_LAUNCH_ADDRESS": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *words, **how):
        return self.launcher.start(*self.words(*words, **how), **self.variables())

    def run(self, *words, **how):
        return self.launcher.run(*self.words(*words, **how), **self.variables())

    def codes(self):
        """How the hosts' processes of launch's ended in the last run."""
        return [int(code) for code in (self.launcher.folder / "codes").read_text().split()]

    def left(self):
        """What lies in the hosts' temporary folders of launch's."""
        return sorted(str(p.relative_to(self.launcher.folder)) for p in self.launcher.folder.glob("h*/mmm-stage-*/*"))


@pytest.fixture
def hosts(launcher, pristine):
    return lambda count: Hosts(launcher, pristine, count)


@pytest.mark.parametrize(("by", "each"), [("host", 1), pytest.param("rank", 2, marks=pytest.mark.long)])
def test_each_host_runs_from_its_own_copy(hosts, by, each):
    """Five hosts: the third and fourth get theirs from the second."""
    made = hosts(5)
    done = made.run("python3", "-c", WHERE, by=by, each=each)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert len(lines) == 5 * each
    for rank, prefix, package, staged in lines:
        assert Path(prefix).parents[1] == made.launcher.folder / f"h{int(rank) // each}"
        assert package.startswith(prefix + "/lib/")
        assert staged == prefix
    assert "env is on 5 hosts (" in done.stderr
    assert "stage           " in done.stderr
    assert made.left() == []
    assert made.launcher.gone(within=2)


@pytest.mark.long
def test_a_copy_is_used_again_and_a_changed_source_is_copied_anew(hosts):
    made = hosts(2)

    def run(*words):
        done = made.run(*words, "python3", "-c", "import sys, thing; sys.stdout.write(f'{thing.VALUE}\\n')")
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split()), {name: os.stat(made.launcher.folder / name).st_ino for name in made.left()}

    thing = next(made.env.glob("lib/python*/site-packages")) / "thing.py"
    thing.write_text("VALUE = 'one'")
    value, first = run("--stage-keep")
    assert value == {"one"}
    assert len(first) == 2
    assert run("--stage-keep") == ({"one"}, first)
    thing.write_text("VALUE = 'two'")  # as long as the other
    value, second = run("--stage-keep")
    assert value == {"two"}
    assert len(second) == 4
    lost = made.launcher.folder / next(name for name in second.keys() - first if name.startswith("h1"))
    next(lost.glob("lib/python*/site-packages/thing.py")).unlink()
    value, third = run("--stage-keep")
    assert value == {"two"}
    assert [name for name in third if third[name] != second[name]] == [str(lost.relative_to(made.launcher.folder))]
    assert run()[1].keys() == first.keys()  # the last run has removed its own


def test_a_source_that_has_changed_has_another_key(tmp_path):
    (tmp_path / "a").write_text("one")
    before = copies.scan(str(tmp_path))
    assert copies.scan(str(tmp_path)) == before
    (tmp_path / "a").write_text("two")  # as long
    os.utime(tmp_path / "a", (1, 1))
    assert copies.scan(str(tmp_path)).key != before.key


def test_on_this_host_alone(launcher, pristine):
    """Scripts that installers have written name the copy, and the copy's programs come first."""
    env = launcher.folder / "env"
    shutil.copytree(pristine, env, symlinks=True)
    (env / "bin/tool").write_text(f"#!{env}/bin/python\nimport sys; sys.stdout.write(sys.prefix + chr(10))\n")
    (env / "bin/tool").chmod(0o755)
    next(env.glob("lib/python*/site-packages")).joinpath("own.pth").write_text(f"{env}/more\n")
    (launcher.folder / "t").mkdir()
    variables = {"TMPDIR": str(launcher.folder / "t"), "PATH": f"{env}/bin:{os.environ['PATH']}"}
    done = launcher.run("-n", "2", "--stage", "env", "tool", **variables)
    assert done.returncode == 0, done.stderr
    assert [Path(line).parents[1] for line in done.stdout.split()] == [launcher.folder / "t"] * 2
    assert list((launcher.folder / "t").glob("*/*")) == []
    code = "import os, shutil, sys; print(shutil.which('tool'), *[p for p in sys.path if p.endswith('more')])"
    (env / "more").mkdir()
    done = launcher.run("-n", "1", "--stage", "env", "--stage-keep", "python3", "-c", code, **variables)
    assert done.returncode == 0, done.stderr
    tool, more = done.stdout.split()
    assert Path(tool).parent.parent == Path(more).parent
    assert Path(more).parents[2] == launcher.folder / "t"
    failed = launcher.run("-n", "1", "--stage", "env", "python3", "-c", "raise SystemExit(3)", **variables)
    assert failed.returncode == 3
    assert list((launcher.folder / "t").glob("*/*")) == []


@pytest.mark.parametrize("top", ["env", pytest.param(".", marks=pytest.mark.long)])
def test_an_archive(hosts, top):
    made = hosts(3)
    with tarfile.open(made.launcher.folder / "env.tar.gz", "w:gz") as tar:
        tar.add(made.env, arcname=top)
    shutil.rmtree(made.env)
    done = made.run("python3", "-c", WHERE, source="env.tar.gz")
    assert done.returncode == 0, done.stderr
    assert {Path(line.split()[1]).parents[1].name for line in done.stdout.splitlines()} == {"h0", "h1", "h2"}
    assert made.left() == []


@pytest.mark.parametrize(
    "where", ["in a file", *(pytest.param(at, marks=pytest.mark.long) for at in ("in a header", "between files"))]
)
def test_an_archive_that_is_cut_short(hosts, where):
    made = hosts(3)
    with tarfile.open(made.launcher.folder / "env.tar", "w") as tar:
        tar.add(made.env, arcname=".")
    with tarfile.open(made.launcher.folder / "env.tar") as tar:
        member = next(each for each in tar if each.isreg() and each.size > 512 and each.offset > 100_000)
    at = {"in a file": member.offset_data + 512, "in a header": member.offset + 100, "between files": member.offset}
    os.truncate(made.launcher.folder / "env.tar", at[where])
    done = made.run("python3", "-c", WHERE, source="env.tar")
    assert done.returncode == 1
    assert f"launch: --stage {made.launcher.folder}/env.tar: h" in done.stderr
    assert "the archive is cut short, or no tar (" in done.stderr
    assert done.stderr.count("launch: ") == 1
    assert made.left() == []


def test_a_host_without_room(hosts):
    made = hosts(4)
    (made.launcher.folder / "h2" / f"mmm-stage-{os.getuid()}").write_text("not a folder")
    done = made.run("python3", "-c", WHERE)
    assert done.returncode == 1
    assert f": h2: {made.launcher.folder}/h2/mmm-stage-{os.getuid()}: File exists (--stage-to" in done.stderr
    assert done.stderr.count("launch: ") == 1
    assert made.left() == []
    assert done.stdout == ""
    assert made.codes() == [0] * 4  # at another an MPI kills the others, which may still remove their copies


def test_an_environment_without_mmm(hosts):
    made = hosts(2)
    shutil.rmtree(next(made.env.glob("lib/python*/site-packages/mmm")))
    done = made.run("python3", "-c", WHERE)
    assert done.returncode == 1
    assert "the copied Python cannot start ranks (ModuleNotFoundError: No module named 'mmm')" in done.stderr
    assert made.left() == []


def large(made):
    """Makes the copy take a second or two."""
    with (made.env / "large").open("wb") as file:
        file.truncate(400_000_000)


def until_copying(made, host):
    deadline = time.monotonic() + 60
    while not list((made.launcher.folder / host).glob("mmm-stage-*/.env-*/bin")):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def of_host(launcher, name):
    found = []
    for pid in launcher.alive():
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={name}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.long
def test_a_host_dies_while_it_copies(hosts):
    made = hosts(5)
    large(made)
    process = made.start("python3", "-c", WHERE)
    until_copying(made, "h1")
    for pid in of_host(made.launcher, "h1"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    said = [line for line in err.splitlines() if line.startswith("launch: ")]
    assert said == [
        f"launch: lost h1 while {made.env} was copied to it: the connection to launch broke (its end was closed)"
    ]
    assert made.launcher.gone(within=5)
    assert not [name for name in made.left() if not name.startswith("h1/")]
    (made.env / "large").unlink()
    assert made.run("python3", "-c", WHERE).returncode == 0
    assert made.left() == []  # also what the killed one has left


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_launch_is_told_to_end_while_hosts_copy(hosts, number):
    made = hosts(3)
    large(made)
    process = made.start("python3", "-c", WHERE)
    until_copying(made, "h2")
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (128 + number, "")
    assert made.launcher.gone(within=5)
    assert made.left() == []
    assert made.codes() == [0] * 3


def test_launch_is_killed_while_hosts_copy(hosts):
    made = hosts(3)
    large(made)
    process = made.start("python3", "-c", WHERE)
    until_copying(made, "h2")
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert made.launcher.gone(within=10)
    assert made.left() == []
    assert made.codes() == [0] * 3


@pytest.mark.long
def test_attempts_use_the_same_copies(hosts):
    made = hosts(2)
    code = """import os, sys
sys.stdout.write(f"{os.stat(os.environ['MMM_STAGED']).st_ino}\\n")
sys.exit(os.environ['MMM_ATTEMPT'] < '2')"""
    done = made.run("--retries", "2", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 2
    assert made.left() == []
    began = time.monotonic()
    last = made.run("--retries", "1", "python3", "-c", "raise SystemExit(5)")
    assert last.returncode == 5
    assert time.monotonic() - began < REMOVAL  # the hosts were told, and did not wait until they were ended
    assert made.left() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--stage", "none"], "--stage"),
        (["--stage", "file"], "--stage"),
        (["--stage-to", "/tmp"], "--stage-to"),
        (["--stage-keep"], "--stage-keep"),
        (["--stage", ".", "--stage-to", "here"], "--stage-to"),
    ],
)
def test_options_that_are_wrong(launcher, words, says):
    launcher.write("file", "no archive")
    done = launcher.run(*words, "python3", "-c", "1")
    assert done.returncode == 2
    assert says in done.stderr


def test_too_little_room(tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"x" * 10_000_000)
    copy = Copy(copies.scan(str(tmp_path / "s")), str(tmp_path / "t"))
    copy.own_folder()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 2_000_000))
    with pytest.raises(LaunchError, match=r"10 MB are needed in .*, and 2 MB are free \(--stage-to\)"):
        copy.make_room()


def test_nobody_removes_a_copy_that_another_run_uses(tmp_path):
    (tmp_path / "s").mkdir()
    found = Stage(str(tmp_path / "s"), str(tmp_path / "t"))
    with host.on_this_host(found) as first:
        with host.on_this_host(found) as second:
            assert first == second
        assert os.path.isdir(first)
    assert not os.path.exists(first)


def test_a_copy_whose_maker_is_killed_while_it_is_tried_does_not_stay(tmp_path, monkeypatch):
    copy = empty_copy(tmp_path)
    monkeypatch.setattr(copies.stage, "interpreter", lambda source, path: "python")
    monkeypatch.setattr(copies, "_try", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert made_by_another(copy) == -signal.SIGKILL
    assert copy.path.exists()
    assert not copy.is_there()
    copy.make_room()
    assert not list(copy.parent.iterdir())


def test_a_copy_whose_maker_is_told_to_end_while_it_is_tried_does_not_stay(tmp_path, monkeypatch):
    copy = empty_copy(tmp_path)
    monkeypatch.setattr(copies.stage, "interpreter", lambda source, path: "python")
    monkeypatch.setattr(copies, "_try", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit), host.ending_raises():
        copy.make(copies.pack(copy.source))
    assert not list(copy.parent.iterdir())


def test_a_copy_that_another_run_has_made_meanwhile_is_used(tmp_path):
    copy = empty_copy(tmp_path)
    assert made_by_another(copy) == 0
    inode = copy.path.stat().st_ino
    copy.make(copies.pack(copy.source))
    assert copy.lock is not None
    assert [(path, path.stat().st_ino) for path in copy.parent.iterdir()] == [(copy.path, inode)]


def test_a_copy_that_another_run_puts_in_the_place_of_a_damaged_one_stays(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_text("x")
    found = Stage(str(tmp_path / "s"), str(tmp_path / "t"))
    with host.on_this_host(found) as path:
        os.unlink(f"{path}/f")
        with host.on_this_host(Stage(found.source, found.to, keep=True)) as other:
            assert other == path
    assert Path(path, "f").read_text() == "x"


def empty_copy(folder):
    """What is to be a copy of an empty folder."""
    (folder / "s").mkdir()
    copy = Copy(copies.scan(str(folder / "s")), str(folder / "t"))
    copy.own_folder()
    copy.make_room()
    return copy


def made_by_another(copy):
    """How a process ended that makes the copy."""
    pid = os.fork()
    if pid == 0:
        copy.make(copies.pack(copy.source))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_packed_is_what_tar_packs(tmp_path):
    """Links, hard links, modes, times, empty and large files."""
    folder = tmp_path / "s"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "large").write_bytes(os.urandom(3 * copies.CHUNK + 17))
    (folder / "sub" / "none").touch()
    (folder / "sub" / "run").write_text("#!/bin/sh\n")
    (folder / "sub" / "run").chmod(0o750)
    (folder / "sub" / "link").symlink_to("../large")
    os.link(folder / "large", folder / "sub" / "same")
    (folder / ("long" * 50)).write_text("name")
    os.utime(folder / "sub" / "run", (1e9, 1e9))
    pieces = list(copies.pack(copies.scan(str(folder))))
    assert all(copies.CHUNK <= len(piece) < 2 * copies.CHUNK for piece in pieces[:-1])
    (tmp_path / "ours.tar").write_bytes(b"".join(pieces))
    with tarfile.open(tmp_path / "theirs.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder, arcname=".")

    def members(name):
        with tarfile.open(tmp_path / name) as tar:
            return sorted(
                (m.name, m.type, m.mode, m.mtime, m.linkname, m.isreg() and tar.extractfile(m).read()) for m in tar
            )

    assert members("ours.tar") == members("theirs.tar")


def test_a_file_that_becomes_shorter_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "f").write_text("x")
    with pytest.raises(OSError, match="f became shorter while it was read"):
        list(copies._read(str(tmp_path / "f"), 2))


def transferred(spoil, keys=(bytes(32), bytes(32))):
    """What a host gets that `spoil` stands on the way to: pieces as they are sent, which it may change."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    sender = Link(theirs, keys[0], b"")
    frames = [sender._seal(piece) for piece in (b"a" * 1000, b"b" * 1000, b"")]

    def send():
        theirs.sendall(b"".join(spoil(frames)))
        theirs.close()

    threading.Thread(target=send).start()
    return list(host._received(Link(ours, b"", keys[1])))


def test_pieces_are_signed():
    assert transferred(lambda f: f) == [b"a" * 1000, b"b" * 1000]
    for keys, spoil in (
        ((bytes(32), bytes(31) + b"x"), lambda f: f),  # of another run
        ((bytes(32), bytes(32)), lambda f: [f[0][:-1] + b"x", *f[1:]]),
        ((bytes(32), bytes(32)), lambda f: [f[1], f[0], f[2]]),  # in another order
    ):
        with pytest.raises(Lost, match=r"connection to 127.0.0.1 broke \(somebody else wrote to the connection"):
            transferred(spoil, keys)
    with pytest.raises(Lost, match=r"the connection to 127.0.0.1 broke \(its end was closed"):
        transferred(lambda f: f[:2])  # without its end


def test_who_does_not_know_the_token_gets_nothing():
    stager = host.Stager(None, "secret")
    port = stager.listen("127.0.0.1")
    served = []
    thread = threading.Thread(target=lambda: served.extend(stager.accept(1)))
    thread.start()
    idle = socket.create_connection(("127.0.0.1", port))  # nobody waits for it
    with pytest.raises(Lost):
        reach([["127.0.0.1", port]], "guessed", 10.0)
    known = reach([["127.0.0.1", port]], "secret", 10.0)
    thread.join(10)
    served[0].socket.sendall(b"x")
    assert known.socket.recv(1) == b"x"
    idle.close()


def test_variables_that_name_the_source():
    environ = {"PATH": "/x/env/bin:/usr/bin", "PYTHONPATH": "/x/env/lib:/x/environment", "HOME": "/x/env"}
    changed = stage.environment(environ, "/x/env", "/tmp/c")
    assert changed == {"MMM_STAGED": "/tmp/c", "PATH": "/tmp/c/bin:/usr/bin", "PYTHONPATH": "/tmp/c/lib:/x/environment"}


def test_a_run_that_ends_leaves_another_the_folder(tmp_path):
    """The other has made sure of it, and has no copy in it yet."""
    (tmp_path / "env").mkdir()
    source = copies.scan(str(tmp_path / "env"))
    ends, begins = (Copy(source, str(tmp_path / "disk")) for _ in range(2))
    ends.own_folder()
    ends.path.mkdir()
    ends.lock = os.open(ends.path, os.O_RDONLY)
    begins.own_folder()
    ends.remove(keep=False)
    assert not ends.path.exists()
    begins.make_room()
