"""``mmm doctor`` as a command: exit codes, --json, and a broken torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmm.errors import DeviceError
from mmm.runtime.device import OLDEST_TORCH, choose_device
from mmm.runtime.ranks import whoami
from mmm_lab.cli.doctor import checks, collectives, devices, job, python, storage
from mmm_lab.cli.doctor.checks import examine
from mmm_lab.cli.doctor.finding import Finding, Place, lines, summary
from mmm_lab.cli.doctor.isolated import isolated
from support.clock import PATIENCE, stretched
from support.processes import wait_for, wait_for_ends
from support.signals import as_from_a_terminal

COMMAND = [sys.executable, "-m", "mmm_lab.cli.main", "doctor"]


def environment(**variables):
    places = [variables.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **variables}


def doctor(folder, *flags, **variables):
    how = {"cwd": folder, "env": environment(**variables), "capture_output": True, "text": True, "timeout": PATIENCE}
    return subprocess.run([*COMMAND, *flags], **how)


def test_a_broken_torch_is_reported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    done = doctor(tmp_path, "--json", PYTHONPATH=str(tmp_path))
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert found["torch"]["status"] == found["devices"]["status"] == found["collectives"]["status"] == "fail"
    assert "libtorch_cpu.so: cannot open" in found["torch"]["seen"]
    assert found["torch"]["fix"]
    assert found["outdir"]["status"] == "ok"
    assert set(found["python"]) == {"name", "status", "seen", "fix"}


@pytest.mark.long
def test_a_torch_that_leaves_or_hangs(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('no')")
    done = doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "FAIL  torch" in done.stdout
    assert "SystemExit: no" in done.stdout
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    done = doctor(tmp_path, "--timeout", "0.5", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "gave no answer in 2 s" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_wrong_flags(tmp_path):
    assert doctor(tmp_path, "--timeout", "0").returncode == 2
    assert doctor(tmp_path, "--jsn").returncode == 2


@pytest.mark.long
def test_this_machine(tmp_path):
    done = doctor(tmp_path, "--json", "--outdir", str(tmp_path / "runs"))
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["torch"]["status"] == found["matmul cpu"]["status"] == found["all-reduce cpu"]["status"] == "ok"
    assert str(tmp_path / "runs") in found["outdir"]["seen"]
    done = doctor(tmp_path, TORCH_LOGS="")
    assert done.returncode == 1
    assert "unset TORCH_LOGS" in done.stdout


@pytest.mark.long
def test_warnings_are_no_failure(tmp_path):
    old = {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    (tmp_path / "nodes").write_text("localhost\nno-such-host.invalid\n")
    done = doctor(tmp_path, **old)
    assert done.returncode == 0, done.stdout
    assert "warn  hosts" in done.stdout


@pytest.mark.parametrize(
    ("number", "says", "code"), [(signal.SIGINT, "mmm: interrupted\n", 130), (signal.SIGKILL, "", -9)]
)
def test_interrupted_or_killed_it_leaves_nothing(tmp_path, number, says, code):
    (tmp_path / "pids").mkdir()
    text = "import os, time\nopen('pids/torch', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    (tmp_path / "torch.py").write_text(text)
    how = {"env": environment(PYTHONPATH=str(tmp_path)), "stderr": subprocess.PIPE, "preexec_fn": as_from_a_terminal()}
    process = subprocess.Popen(COMMAND, cwd=tmp_path, text=True, **how)
    wait_for(tmp_path / "pids", 1)
    process.send_signal(number)
    assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (says, code)
    wait_for_ends(tmp_path / "pids")


def one(findings):
    (finding,) = findings
    return finding


def statuses(findings):
    return {each.name: each.status for each in findings}


# The child process that each check runs in.


def test_a_check_that_hangs_is_a_failure_in_its_time(tmp_path):
    def hangs():
        yield Finding("first", "ok", "came in time")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        (tmp_path / "own").write_text(str(os.getpid()))
        time.sleep(60)

    begin = time.monotonic()
    first, second = isolated("slow", hangs, 0.5, "look there")
    assert time.monotonic() - begin < 30  # of 60
    assert (first.name, first.status) == ("first", "ok")
    assert second == Finding("slow", "fail", "gave no answer in 0.5 s, and was ended", "look there")
    wait_for_ends(tmp_path)


def test_a_check_that_raises_leaves_or_dies():
    def raises():
        raise OSError("no such thing")

    def leaves():
        raise SystemExit(3)

    def dies():
        yield Finding("first", "ok", "said before")
        os.kill(os.getpid(), signal.SIGTERM)

    failed = one(isolated("x", raises, 5, "fix it"))
    assert (failed.status, failed.fix) == ("fail", "fix it")
    assert "OSError: no such thing" in failed.seen
    assert "SystemExit: 3" in one(isolated("x", leaves, 5)).seen
    first, second = isolated("x", dies, 5)
    assert (first.status, second.status) == ("ok", "fail")
    assert "SIGTERM" in second.seen


def test_one_check_does_not_keep_the_others_and_what_it_prints_is_not_seen(capfd):
    def hangs(place):
        print("noise", flush=True)
        os.write(2, b"noise")
        time.sleep(60)

    made = [checks.Check("a", hangs, "fix a"), checks.Check("b", lambda place: [Finding("b", "ok", "fine")])]
    assert statuses(examine(Place(timeout=stretched(0.3)), made)) == {"a": "fail", "b": "ok"}
    assert capfd.readouterr() == ("", "")


# Python and packages.


def test_python():
    assert one(python.check_python(Place(environ={}))).status == "ok"
    old = one(python.check_python(Place(environ={}), (3, 9, 1)))
    assert (old.status, "3.10 or newer" in old.fix) == ("fail", True)


@pytest.mark.parametrize(
    ("requires", "status", "words"),
    [
        (["numpy>=1.0", 'absent-thing>=1; extra == "more"'], "ok", "numpy"),
        (["numpy>=999.5"], "fail", "< 999.5"),
        (["absent-thing>=1.2"], "fail", "no absent-thing"),
    ],
)
def test_packages(monkeypatch, requires, status, words):
    monkeypatch.setattr(python.metadata, "requires", lambda name: requires)
    finding = one(python.check_packages(Place()))
    assert finding.status == status
    assert words in finding.seen
    if status == "fail":
        assert finding.fix.endswith(f"-m pip install '{requires[0]}'")
    monkeypatch.undo()
    assert one(python.check_packages(Place(), "no-such-distribution")).status == "warn"


# torch, devices, collectives.


def test_a_torch_that_is_too_old(monkeypatch):
    """`mmm doctor`, a run and both wheels have one bound: a run with an older PyTorch was silently wrong."""
    root = Path(__file__).parents[3]
    oldest = f"torch>={OLDEST_TORCH}"
    for file in ("pyproject.toml", "packages/verify/pyproject.toml"):
        assert f'"{oldest}"' in (root / file).read_text()
    for version, status in (
        ("1.13.1", "fail"),
        ("2.10.0", "fail"),
        ("2.9.1", "fail"),
        ("2.11.0a0+git1", "ok"),
        ("2.11.0+cpu", "ok"),
        ("3.0.0a0+git1", "ok"),
    ):
        monkeypatch.setattr("torch.__version__", version)
        for name in ("check_devices", "check_collectives"):
            monkeypatch.setattr(devices, name, lambda _: iter(()))
        (finding,) = devices.check_torch(Place())
        assert finding.status == status
        assert (oldest in finding.fix) == (status == "fail")
        if status == "fail":
            with pytest.raises(DeviceError, match=f"{version}.*{oldest}"):
                choose_device("cpu", whoami())


def test_matmul_right_and_wrong():
    import torch

    assert one(devices.check_matmul("cpu")).status == "ok"
    wrong = one(devices.check_matmul("cpu", lambda a, b: torch.matmul(a, b).roll(1)))
    assert wrong.status == "fail"
    assert "are wrong" in wrong.seen
    one_number = torch.zeros(256, 256)
    one_number[3, 5] = 1
    assert "1 of 65,536" in one(devices.check_matmul("cpu", lambda a, b: torch.matmul(a, b) + one_number)).seen


def test_a_collective_of_each_kind(tmp_path):
    found = list(collectives.check_collectives(Place(environ={}, root=tmp_path)))
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
    assert statuses(found) == {f"{kind} cpu": "ok" for kind in kinds}, found


def test_two_ranks_that_do_not_meet(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setattr(collectives, "EXPECTED", {"all-reduce": collectives.EXPECTED["all-reduce"]})
    failed = one(collectives.check_collectives(Place(environ={}, timeout=10)))
    assert failed.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in failed.fix


@pytest.mark.parametrize("kind", collectives.EXPECTED)
def test_wrong_numbers_are_a_failure(monkeypatch, kind):
    right = collectives.EXPECTED[kind]
    wrong = [[float(value) for value in right[0]], [float("nan")] * len(right[1])]
    monkeypatch.setattr(collectives, "fork_ranks", lambda *_, **__: [("gloo", values) for values in wrong])
    failed = one(collectives.two_ranks(kind, "cpu", 5))
    assert (failed.name, failed.status) == (f"{kind} cpu", "fail")


def test_accelerators_of_the_machine_that_torch_does_not_see(tmp_path):
    found = devices.accelerators.Accelerators("cuda", 2, "2 NVIDIA GPUs")
    failed = one(devices._count(found))
    assert (failed.name, failed.status) == ("devices", "fail")
    assert "torch sees none" in failed.seen
    assert one(devices._count(devices.accelerators.Accelerators(None, 0, "torch is built for CPU"))).status == "ok"


# The scheduler.


def pbs(folder, text):
    (folder / "nodes").write_text(text)
    return {"PBS_JOBID": "7", "PBS_NODEFILE": str(folder / "nodes")}


def test_scheduler(tmp_path):
    assert "none" in one(job.check_job(Place(environ={}))).seen
    found, hosts = job.check_job(Place(environ=pbs(tmp_path, "x1\nx1\n\nx2\n")), lambda name: True)
    assert found.seen.startswith("PBS, 2 hosts: x1, x2 (PBS_NODEFILE=")
    assert (found.status, hosts.status) == ("ok", "ok")
    first = list(job.check_job(Place(environ=pbs(tmp_path, "x1\nx2")), lambda name: name == "x2"))
    other = list(job.check_job(Place(environ=pbs(tmp_path, "x1\nx2")), lambda name: name == "x1"))
    assert (first[1].status, other[1].status) == ("fail", "warn")
    assert "MASTER_ADDR" in first[1].fix

    failed = one(job.check_job(Place(environ={"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such/file"})))
    assert (failed.status, "No such file" in failed.seen) == ("fail", True)


# Files.

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw,relatime shared:1 - lustre 10.0.0.1@tcp:/scratch rw
31 22 0:41 / /home rw - nfs4 server:/home rw
32 30 0:42 / /scratch/with\\040space rw - tmpfs tmpfs rw
33 22 0:43 / /over rw - overlay overlay rw
34 33 0:44 / /over rw - gpfs fs1 rw
"""


@pytest.fixture
def mounts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/lib", "ext4"),
        ("/scratch/me/venv", "lustre"),
        ("/scratchy", "ext4"),
        ("/home/me", "nfs4"),
        ("/scratch/with space/x", "tmpfs"),
        ("/over/x", "gpfs"),
    ],
)
def test_file_system(mounts, path, kind):
    assert storage.file_system(Path(path), mounts) == kind
    assert storage.file_system(Path(path), mounts / "elsewhere") == "unknown"


def test_outdir(tmp_path, monkeypatch):
    place = Place(outdir=tmp_path / "not" / "yet")
    found = {each.name: each for each in storage.check_outdir(place)}
    assert (found["outdir"].status, found["free disk"].status) == ("ok", "ok")
    assert not (tmp_path / "not").exists()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    assert one(storage.check_outdir(Place(outdir=tmp_path / "file"))).status == "fail"

    def refuses(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuses)  # root may write everywhere
    failed = one(storage.check_outdir(place))
    assert (failed.status, "Read-only" in failed.seen) == ("fail", True)


def test_an_outdir_in_memory_on_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "file_system", lambda *_: "tmpfs")
    usage = type("Usage", (), {"free": storage.GIB - 1})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage)
    assert statuses(storage.check_outdir(Place(outdir=tmp_path))) == {"outdir": "warn", "free disk": "warn"}


def test_striping(mounts, monkeypatch):
    """`lfs` is asked where a folder is on Lustre, and there alone."""
    (mounts / "lfs").write_text('#!/bin/sh\n[ "$*" = "getstripe -d -c /" ] && echo "$STRIPES"\n')
    (mounts / "lfs").chmod(0o755)
    text = (mounts / "proc/self/mountinfo").read_text()
    (mounts / "proc/self/mountinfo").write_text(text.replace("ext4 /dev/sda1", "lustre 10.0.0.1@tcp:/root"))

    def found(stripes, path=str(mounts)):
        monkeypatch.setenv("STRIPES", stripes)
        return one(storage.check_striping(Place(outdir=Path("/gone"), root=mounts, environ={"PATH": path})))

    for stripes, seen, advice in (
        ("1", "1 stripe, so", True),
        ("0", "1 stripe, so", True),
        ("8", "8 stripes, so", False),
        ("-1", "over all targets", False),
        ("  lcm_layout_gen:    0\n    lmm_stripe_count:  4", "4 stripes", False),
        ("no such thing", "lfs does not say", True),
    ):
        assert (seen in found(stripes).seen, "lfs setstripe -c 8 /" in found(stripes).fix) == (True, advice), stripes
    assert "lfs does not say" in found("1", path="/gone").seen
    on_disk = Place(outdir=Path("/home/me"), root=mounts, environ={"PATH": str(mounts)})
    assert list(storage.check_striping(on_disk)) == []


# The table.


def test_lines_fit_and_are_counted():
    warned = Finding("longer name", "warn", "y", "do " * 80)
    findings = [Finding("a", "ok", "x " * 200), warned, Finding("b", "fail", "")]
    text = [line for finding in findings for line in lines(finding).splitlines()]
    assert max(map(len, text)) <= 100
    assert text[0].startswith("ok    a    ")
    assert summary(findings) == "1 ok, 1 warn, 1 fail"
    assert "→ do do" in "\n".join(text)
    assert text[-1].startswith("FAIL  b")


def test_nothing_of_it_imports_torch():
    code = "import sys, mmm_lab.cli.doctor; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
