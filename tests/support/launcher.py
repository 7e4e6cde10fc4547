"""Launches small programs and says what they printed, how they ended, and which of their processes are left."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.clock import PATIENCE
from support.signals import as_from_a_terminal

# Variables of this process that a launch must not inherit.
OURS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MMM_DEVICE",
    "OMP_NUM_THREADS",
)
# Seconds in which processes that outlive launch may still make a file.
LEFT_BEHIND = 10.0
START = [sys.executable, "-m", "mmm_launch"]
WITH_CLOCKS = (
    "from mmm_launch import __main__; from mmm_launch.run import control; vars(control).update({clocks}); "
    "__main__.main()"
)
MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]: sys.exit(print("HYDRA build details:"))
count, command = int(words[words.index("-n") + 1]), words[words.index(sys.executable):]
ranks = [{{"PMI_RANK": str(rank), "PMI_SIZE": str(count), "MPI_LOCALRANKID": str(rank)}} for rank in range(count)]
sys.exit(max([p.wait() for p in [subprocess.Popen(command, env=os.environ | rank) for rank in ranks]]))
"""

# In `make test` by fork alone.
SPAWNED_IN_LONG = pytest.mark.parametrize(
    "launch_options", ["prefork", pytest.param("spawn", marks=pytest.mark.long)], indirect=True
)


@dataclass
class Launcher:
    """Runs `launch` in `folder`, with a variable in the environment by which its processes can be told."""

    folder: Path
    # What launch is started by: on another host, say.
    prefix: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    # The last that `start` has started.
    process: subprocess.Popen | None = None

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        made = {k: v for k, v in os.environ.items() if k not in OURS} | {"MMM_TEST_MARK": self.mark} | variables
        places = [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        return made | {"PYTHONPATH": os.pathsep.join(filter(None, places))}

    def start(
        self, *argv: str, ignored: tuple[int, ...] = (), clocks: dict[str, float] | None = None, **variables: str
    ) -> subprocess.Popen:
        """Start launch, with default signal handling but for those `ignored`.

        `clocks`: of mmm_launch.run.control, such as a GRACE so long that a test can tell that it was not needed.
        """
        self.write("typed", "for launch's own stdin, not the ranks'")
        start = [*START[:1], "-c", WITH_CLOCKS.format(clocks=clocks)] if clocks else START
        with (self.folder / "typed").open() as stdin:
            self.process = subprocess.Popen(
                [*self.prefix, *start, *argv],
                cwd=self.folder,
                env=self.environment(**variables),
                text=True,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=as_from_a_terminal(*ignored),
            )
        return self.process

    def run(
        self,
        *argv: str,
        timeout: float = PATIENCE,
        ignored: tuple[int, ...] = (),
        clocks: dict[str, float] | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess:
        process = self.start(*argv, ignored=ignored, clocks=clocks, **variables)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"launch hung: {process.communicate()}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def begin(self, program: str, *argv: str, ranks: int = 2, **named) -> subprocess.Popen:
        """Start launch on a program, and wait until each of its ranks has made the file ``ready-RANK``."""
        self.write("t.py", program)
        process = self.start(*argv, "-n", str(ranks), "--device", "cpu", "python3", "t.py", **named)
        self.wait_for(*(f"ready-{rank}" for rank in range(ranks)))
        return process

    def on_hosts(self) -> list[str]:
        """Options by which launch takes this host for one of a cluster, with an mpiexec that is no MPI's."""
        mpiexec = self.write("mpiexec", MPIEXEC)
        mpiexec.chmod(0o755)
        return ["--scheduler", "none", "--hosts", "localhost", "--mpiexec", str(mpiexec)]

    def wait_for(self, *names: str, timeout: float = PATIENCE) -> None:
        """Wait until the programs have made these files."""
        deadline = time.monotonic() + timeout
        while not all((self.folder / name).exists() for name in names):
            if self.process is not None and self.process.poll() is not None:
                deadline = min(deadline, time.monotonic() + LEFT_BEHIND)
            if time.monotonic() > deadline:
                raise AssertionError(f"{names} after {timeout} s: {os.listdir(self.folder)}; launch {self._state()}")
            time.sleep(0.01)

    def _state(self) -> str:
        """How the last launch ended and what it said; or that it runs."""
        if self.process is None or self.process.poll() is None:
            return f"runs: {self.alive()}"
        return f"ended: {self.process.returncode} {self.process.communicate()}"

    def alive(self) -> list[int]:
        """Living processes that have the mark."""
        results = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    is_ours = self.mark.encode() in (path / "environ").read_bytes()
                    if is_ours and (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        results.append(int(path.name))
        return results

    def gone(self, within: float) -> bool:
        """True once nothing is left, False if something is after `within` seconds."""
        deadline = time.monotonic() + within
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True
