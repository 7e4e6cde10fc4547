"""Scaling: the same training on more and more ranks, with speed-up and efficiency next to the prediction and the ideal.

    python3 -m mmm.examples.scaling --ranks 1,2,4                        # weak: a rank's batch stays
    python3 -m mmm.examples.scaling --ranks 1,2,4 --strong               # the global batch stays
    python3 -m mmm.examples.scaling --ranks 4,8,64 --lines --outdir s            # lines for jobs; once they ran: draw

Start it without `launch`: each point is a run of a trainer that it launches itself, with its own record, for example in
OUTDIR/weak-4. A point that has a record of the same command is not run again. With R(n) the samples per second on n
ranks, and m the smallest number of ranks::

      speed-up      m · R(n) / R(m)          ideal: n         efficiency: over n

      weak          a data-parallel rank keeps its batch: n times the work, ideally in the same time (Gustafson)
      strong        the global batch stays: the same work in 1/n of the time; what does not shrink limits it (Amdahl)

*Waited* is the share of a step that a rank spent in collectives (dt - dt_own). *Predicted* is what `mmm plan` computes
for such a run. It needs the machine's rates, and `mmm machine --measure` finds those of this one.

Sources: Amdahl, "Validity of the single processor approach", 1967; Gustafson, "Reevaluating Amdahl's law", 1988.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mmm.errors import ConfigError
from mmm.examples._support.scaling_report import Point, draw, read_point, table
from mmm.history.record.folder import prepare
from mmm.run.command_line import parse, run_main
from mmm.runtime.ranks import whoami


@dataclass(frozen=True, kw_only=True)
class Config:
    """What runs, and on how many ranks."""

    ranks: str = "1,2,4"
    """Numbers of ranks, in increasing order."""
    strong: bool = False
    """Strong scaling: the global batch stays. Default: weak scaling, where a data-parallel rank keeps its batch."""
    batch_size: int = 4
    """Samples of a step on each data-parallel rank. With --strong the global batch is this times the most ranks."""
    steps: int = 20
    """Steps of a run. The first two do not count."""
    program: str = "mmm.trainer.lm"
    """The module that trains."""
    flags: str = "--preset debug --dataset random --seq_length 256 --dim 256 --vocab_size 2048 --eval_batches 1"
    """Flags of the program: its model, its layout, its device. As one word: --flags="--preset gpt2 --tp 2"."""
    lines: bool = False
    """Print the command line of each point that has no record yet, and run nothing: for jobs of a cluster."""
    outdir: Path | None = None
    """Folder of the records. Default: outputs/scaling/<time>."""

    def check(self) -> None:
        """Raises ConfigError for the first value that is wrong."""
        numeric = all(count.strip().isdigit() for count in self.ranks.split(","))
        if not numeric or self.rank_counts() != sorted({*self.rank_counts()} - {0}):
            raise ConfigError(f"--ranks {self.ranks}: give numbers from 1, each more than the one before, as in 1,2,4")
        if self.batch_size < 1 or self.steps < 4:
            raise ConfigError(f"--batch_size {self.batch_size} --steps {self.steps}: at least 1, and at least 4")

    def rank_counts(self) -> list[int]:
        return [int(count) for count in self.ranks.split(",")]

    @property
    def kind(self) -> str:
        return "strong" if self.strong else "weak"


def program_line(config: Config, ranks: int, outdir: Path) -> list[str]:
    """The command line of a point: the program and its flags. Its last word is the folder of the point's record."""
    batch = ["--batch_size", str(config.batch_size)]
    if config.strong:
        most_ranks = max(config.rank_counts())
        batch = ["--global_batch_size", str(config.batch_size * most_ranks)]
    folder = outdir / f"{config.kind}-{ranks}"
    return [
        "python3",
        "-m",
        config.program,
        *shlex.split(config.flags),
        *batch,
        "--max_iters",
        str(config.steps),
        "--own_work",
        "--no-plots",
        "--overwrite",
        "--outdir",
        str(folder),
    ]


def run_point(ranks: int, line: list[str]) -> None:
    """Launch a point. What it prints is in its log.txt.

    Raises:
        SystemExit: the run failed. The exit code is that of the run.
    """
    # Each rank of every point has one thread. Otherwise a single rank would use all cores of a CPU.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "mmm_launch", "-n", str(ranks), *line]
    print(shlex.join(command[1:]), flush=True)
    code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environ).returncode
    if code != 0:
        raise SystemExit(code)


def main(config: Config) -> None:
    if whoami().source != "alone":
        raise ConfigError("scaling launches the ranks of each point itself: start it without `launch`")
    outdir = prepare(config.outdir, "scaling")
    points: list[Point] = []
    missing: list[str] = []
    for ranks in config.rank_counts():
        line = program_line(config, ranks, outdir)
        point = read_point(ranks, line)
        if point is None and config.lines:
            print(shlex.join(["launch", "-n", str(ranks), *line]))
        elif point is None:
            run_point(ranks, line)
            point = read_point(ranks, line)
        if point is None:
            missing.append(str(ranks))
        else:
            points.append(point)
    if points:
        print(table(points))
    if missing:
        print(f"no record yet of {', '.join(missing)} ranks: once they have run, the same line draws")
        return
    picture = draw(points, f"{config.kind} scaling of {config.program}", outdir / f"{config.kind}.png")
    print(f"picture: {picture}")


if __name__ == "__main__":
    run_main(lambda: main(parse(Config, __doc__)))
