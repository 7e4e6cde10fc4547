"""What `launch --stage` takes: from host to host, beside every host reading from the first.

    python benchmarks/staging.py [--hosts 8] [--megabytes 200] [--mbits 200] [--rounds 1] [--place /dev/shm]

As root, on Linux with iproute2. Hosts are network namespaces on one bridge, each with a network of --mbits in both
directions (tc's token bucket), so that the network is the limit and not this machine. The environment is made up: half
of it files of 20 kB, half of 10 MB, which do not compress. The time is launch's own: until every host has its copy.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BRIDGE = "mmmbridge"
MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]: sys.exit(print("HYDRA build details:"))
command = words[words.index(sys.executable):]
def start(number):
    name = f"mmmS{{number}}"
    place = {{"PMI_RANK": str(number), "PMI_SIZE": os.environ["HOSTS"], "MPI_LOCALRANKID": "0"}}
    place |= {{"SLURMD_NODENAME": name, "TMPDIR": os.path.abspath(name)}}
    return subprocess.Popen(["ip", "netns", "exec", name, *command], env=os.environ | place)
sys.exit(max(p.wait() for p in [start(n) for n in range(int(os.environ["HOSTS"]))]))
"""
LAUNCH = "import sys; from mmm.launch.staging import spread; from mmm.launch.main import main; "


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(hosts: int, mbits: int):
    """Namespaces mmmS0, mmmS1, … with addresses 10.78.0.1, 10.78.0.2, …"""
    names = [f"mmmS{number}" for number in range(hosts)]
    limit = ["tbf", "rate", f"{mbits}mbit", "burst", "256kb", "latency", "50ms"]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names, start=1):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", f"b{name}")
            ip("link", "set", f"b{name}", "master", BRIDGE, "up")
            ip("link", "set", f"v{name}", "netns", name)
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", f"v{name}")
            for words in (["lo"], [f"v{name}"]):
                ip("-n", name, "link", "set", *words, "up")
            subprocess.run(["tc", "qdisc", "add", "dev", f"b{name}", "root", *limit], check=True)
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", f"v{name}", "root", *limit], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def make(folder: Path, megabytes: int) -> None:
    (folder / "files").mkdir(parents=True)
    for number in range(megabytes * 50 // 2):
        (folder / "files" / f"{number}.py").write_bytes(os.urandom(20_000))
    for number in range(max(1, megabytes // 20)):
        (folder / f"{number}.so").write_bytes(os.urandom(10_000_000))


def run(folder: Path, names: list[str], fanout: int) -> float:
    """Seconds until every host has the copy."""
    words = [
        "--scheduler",
        "none",
        "--hosts",
        ",".join(names),
        "-ppn",
        "1",
        "--mpiexec",
        "./mpiexec",
        "--device",
        "cpu",
    ]
    code = f"{LAUNCH}spread.FANOUT = {fanout}; sys.exit(main({[*words, '--stage', 'env', 'true']!r}))"
    environ = {"MMM_LAUNCH_ADDRESS": "10.78.0.1", "MASTER_ADDR": "10.78.0.1", "HOSTS": str(len(names))}
    done = subprocess.run(
        ["ip", "netns", "exec", names[0], sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    found = re.search(rf"is on {len(names)} hosts \(.*, in ([\d.]+) s\)", done.stderr)
    if done.returncode or not found:
        raise SystemExit(done.stderr)
    return float(found[1])


def main() -> None:
    made = argparse.ArgumentParser()
    for name, default in (("hosts", 8), ("megabytes", 200), ("mbits", 200), ("rounds", 1)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--place", help="where the environment and all copies lie, such as /dev/shm")
    args = made.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as place, network(args.hosts, args.mbits) as names:
        folder = Path(place)
        make(folder / "env", args.megabytes)
        (folder / "mpiexec").write_text(MPIEXEC)
        (folder / "mpiexec").chmod(0o755)
        for name in names:
            (folder / name).mkdir()
        print(
            f"{args.hosts} hosts, {args.megabytes} MB, {args.mbits} Mbit/s: a host can be sent it in "
            f"{args.megabytes * 8 / args.mbits:.0f} s"
        )
        for _ in range(args.rounds):
            for what, fanout in (
                ("from host to host, each to two others", 2),
                ("every host from the first", args.hosts),
            ):
                print(f"{run(folder, names, fanout):6.1f} s  {what}", flush=True)
                for name in names:
                    shutil.rmtree(folder / name / "mmm-stage-0", ignore_errors=True)


if __name__ == "__main__":
    main()
