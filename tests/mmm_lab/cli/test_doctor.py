"""``mmm doctor`` as a command: exit codes, --json, and a broken torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmm.errors import DeviceError
from mmm.runtime.device import OLDEST_TORCH, choose_device
from mmm.runtime.ranks import whoami
from mmm_lab.cli.doctor import collectives, devices, job, python, storage
from mmm_lab.cli.doctor.examine import Check, examine, findings_of
from mmm_lab.cli.doctor.finding import Finding, summary, text_of
from support.clock import PATIENCE
from support.processes import wait_for, wait_for_ends
from support.signals import as_from_a_terminal

COMMAND = [sys.executable, "-m", "mmm_lab.cli.main", "doctor"]


def environment(**variables):
    places = [variables.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **variables}


def doctor(folder, *flags, **variables):
    options = {
        "cwd": folder,
        "env": environment(**variables),
        "capture_output": True,
        "text": True,
        "timeout": PATIENCE,
    }
    return subprocess.run([*COMMAND, *flags], **options)


def test_a_broken_torch_is_reported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    done = doctor(tmp_path, "--json", PYTHONPATH=str(tmp_path))
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert findings["torch"]["status"] == findings["devices"]["status"] == findings["collectives"]["status"] == "fail"
    assert "libtorch_cpu.so: cannot open" in findings["torch"]["seen"]
    assert findings["torch"]["fix"]
    assert findings["outdir"]["status"] == "ok"
    assert set(findings["python"]) == {"name", "status", "seen", "fix"}


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


def test_wrong_flags(tmp_path):
    assert doctor(tmp_path, "--timeout", "0").returncode == 2
    assert doctor(tmp_path, "--jsn").returncode == 2


@pytest.mark.long
def test_this_machine(tmp_path):
    done = doctor(tmp_path, "--json", "--outdir", str(tmp_path / "runs"))
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert (
        findings["torch"]["status"] == findings["matmul cpu"]["status"] == findings["all-reduce cpu"]["status"] == "ok"
    )
    assert str(tmp_path / "runs") in findings["outdir"]["seen"]
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
    ("signum", "says", "code"), [(signal.SIGINT, "mmm: interrupted\n", 130), (signal.SIGKILL, "", -9)]
)
def test_interrupted_or_killed_it_leaves_nothing(tmp_path, signum, says, code):
    (tmp_path / "pids").mkdir()
    text = "import os, time\nopen('pids/torch', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    (tmp_path / "torch.py").write_text(text)
    options = {
        "env": environment(PYTHONPATH=str(tmp_path)),
        "stderr": subprocess.PIPE,
        "preexec_fn": as_from_a_terminal(),
    }
    process = subprocess.Popen(COMMAND, cwd=tmp_path, text=True, **options)
    wait_for(tmp_path / "pids", 1)
    process.send_signal(signum)
    assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (says, code)
    wait_for_ends(tmp_path / "pids")


def one(findings):
    (finding,) = findings
    return finding


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


# The process of a check.


def findings_of_code(code, timeout=PATIENCE, fix="fix it"):
    """The findings of a check whose process runs `code`."""
    return list(findings_of("x", [sys.executable, "-c", code], timeout, fix))


SAYS = """print('["first", "ok", "said before"]', flush=True); """


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("raise OSError('no such thing')", "OSError: no such thing"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_check_that_raises_leaves_or_dies_is_a_failure(code, seen):
    """What it has printed before counts."""
    first, failed = findings_of_code(f"{SAYS}\n{code}")
    assert (first.name, first.status) == ("first", "ok")
    assert (failed.name, failed.status, failed.fix) == ("x", "fail", "fix it")
    assert seen in failed.seen


def test_a_check_that_hangs_is_a_failure_in_its_time():
    begin = time.monotonic()
    findings = findings_of_code(f"{SAYS} import time; time.sleep(600)", timeout=3)
    # of 600
    assert time.monotonic() - begin < 300
    assert statuses(findings) == {"first": "ok", "x": "fail"}
    assert "no answer in 3 s" in findings[1].seen


def test_one_check_does_not_keep_the_others(tmp_path):
    made = {"a": Check("nothing.here", "fix a"), "python": Check("python.check_python")}
    assert statuses(examine(tmp_path, PATIENCE, made)) == {"a": "fail", "python": "ok"}


# Packages.


@pytest.mark.parametrize(
    ("requirement", "status", "seen"),
    [
        ("numpy>=1.0", "ok", "numpy"),
        ('absent-thing>=1; extra == "more"', "ok", ""),
        ("numpy>=999.5", "fail", "numpy>=999.5 is wanted"),
        ("numpy<1", "fail", "numpy<1 is wanted"),
        ("absent-thing>=1.2", "fail", "there is none"),
    ],
)
def test_packages_that_are_missing_or_too_old_are_named(monkeypatch, tmp_path, requirement, status, seen):
    monkeypatch.setattr(python.metadata, "requires", lambda name: [requirement])
    finding = one(python.check_packages(tmp_path, 5))
    assert finding.status == status
    assert seen in finding.seen
    if status == "fail":
        assert finding.fix.endswith(f"-m pip install '{requirement}'")


def test_without_metadata_the_packages_are_not_known(tmp_path):
    assert one(python.check_packages(tmp_path, 5, "no-such-distribution")).status == "warn"


# torch, devices, collectives.


def test_a_torch_that_is_too_old(monkeypatch, tmp_path):
    """`mmm doctor`, a run and both wheels have one bound: a run with an older PyTorch was silently wrong."""
    root = Path(__file__).parents[3]
    oldest = f"torch>={OLDEST_TORCH}"
    for file in ("pyproject.toml", "packages/verify/pyproject.toml"):
        assert f'"{oldest}"' in (root / file).read_text()
    for version, status in (
        ("1.13.1", "fail"),
        ("2.7.1", "fail"),
        ("2.8.0a0+git1", "ok"),
        ("2.8.0+cpu", "ok"),
        ("3.0.0a0+git1", "ok"),
    ):
        monkeypatch.setattr("torch.__version__", version)
        finding, *_ = devices.check_torch(tmp_path, 5)
        assert finding.status == status
        assert (oldest in finding.fix) == (status == "fail")
        if status == "fail":
            with pytest.raises(DeviceError, match=f"{version}.*{oldest}"):
                choose_device("cpu", whoami())


def test_one_wrong_element_of_a_product_is_a_failure():
    one_number = torch.zeros(256, 256)
    one_number[3, 5] = 1
    assert devices.check_matmul("cpu").status == "ok"
    wrong = devices.check_matmul("cpu", lambda a, b: torch.matmul(a, b) + one_number)
    assert wrong.status == "fail"
    assert "1 of 65,536" in wrong.seen
    not_a_number = devices.check_matmul("cpu", lambda a, b: torch.matmul(a, b) * float("nan"))
    assert not_a_number.status == "fail"


# The collectives that the doctor tries.
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")


def test_a_collective_of_each_kind(tmp_path):
    findings = list(collectives.check_collectives(tmp_path, PATIENCE, tmp_path))
    assert statuses(findings) == {f"{kind} cpu": "ok" for kind in KINDS}, findings


def test_two_ranks_that_do_not_meet(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    failed = one(collectives.check_collectives(tmp_path, 10, tmp_path))
    assert failed.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in failed.fix


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_numbers_are_a_failure(monkeypatch, kind):
    """The second rank has NaN after a collective of one kind."""
    ranks = [{name: values[rank] for name, values in collectives.EXPECTED.items()} for rank in range(2)]
    ranks[1][kind] = [float("nan")] * len(ranks[1][kind])
    monkeypatch.setattr(collectives, "fork_ranks", lambda *_, **__: ranks)
    findings = statuses(collectives.two_ranks("cpu", 5, "fix it"))
    assert [name for name, status in findings.items() if status == "fail"] == [f"{kind} cpu"]


def test_accelerators_of_the_machine_that_torch_does_not_see():
    failed, names = devices.compare(devices.accelerators.Accelerators("cuda", 2, "2 NVIDIA GPUs"))
    assert (failed.name, failed.status, names) == ("devices", "fail", [])
    assert "torch sees none" in failed.seen
    none, _ = devices.compare(devices.accelerators.Accelerators(None, 0, "torch is built for CPU"))
    assert none.status == "ok"


# The scheduler.


@pytest.mark.parametrize(
    ("known", "status"),
    [({"x1", "x2"}, "ok"), ({"x2"}, "fail"), ({"x1"}, "warn")],
)
def test_names_of_hosts_that_are_not_known_here(monkeypatch, tmp_path, known, status):
    """Without the first host's name nothing starts."""
    (tmp_path / "nodes").write_text("x1\nx1\n\nx2\n")
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    findings, hosts = job.check_job(tmp_path, 5, lambda name: name in known)
    assert findings.seen.startswith("PBS, 2 hosts: x1, x2 (PBS_NODEFILE=")
    assert (findings.status, hosts.status) == ("ok", status)
    assert ("MASTER_ADDR" in hosts.fix) == (status != "ok")


def test_a_job_whose_host_file_is_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", "/no/such/file")
    failed = one(job.check_job(tmp_path, 5))
    assert failed.status == "fail"
    assert "No such file" in failed.seen


# Files.


def test_outdir(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "yet"
    assert statuses(storage.check_outdir(folder, 5)) == {"outdir": "ok", "free disk": "ok"}
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    assert one(storage.check_outdir(tmp_path / "file", 5)).status == "fail"

    def refuses(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    # Root may write everywhere.
    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuses)
    failed = one(storage.check_outdir(folder, 5))
    assert (failed.status, "Read-only" in failed.seen) == ("fail", True)


def test_an_outdir_in_memory_on_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "file_system", lambda _: "tmpfs")
    usage = type("Usage", (), {"free": storage.GIB - 1})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage)
    assert statuses(storage.check_outdir(tmp_path, 5)) == {"outdir": "warn", "free disk": "warn"}


@pytest.mark.parametrize(
    ("stripes", "seen", "advice"),
    [
        ("1", "1 stripes", True),
        ("0", "1 stripes", True),
        ("8", "8 stripes", False),
        ("-1", "over all targets", False),
        ("  lcm_layout_gen:    0\n    lmm_stripe_count:  4", "4 stripes", False),
        ("no such thing", "lfs does not say", True),
    ],
)
def test_striping(monkeypatch, tmp_path, stripes, seen, advice):
    """A folder on Lustre, as `df` says; its stripes are what `lfs` prints."""
    for name, printed in (("df", "Type\nlustre"), ("lfs", stripes)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{printed}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    outdir, _, striping = storage.check_outdir(tmp_path, 5)
    assert "on lustre" in outdir.seen
    assert seen in striping.seen
    assert ("lfs setstripe" in striping.fix) == advice


# The table.


def test_a_failure_is_seen_and_findings_are_counted():
    findings = [Finding("a", "ok", "x"), Finding("longer name", "warn", "y", "do this"), Finding("b", "fail", "")]
    text = "\n".join(map(text_of, findings))
    assert summary(findings) == "1 ok, 1 warn, 1 fail"
    assert "→ do this" in text
    assert "FAIL  b" in text


def test_nothing_of_it_imports_torch():
    code = "import sys, mmm_lab.cli.doctor; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
