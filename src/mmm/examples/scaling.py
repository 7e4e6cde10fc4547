"""Scaling: the same training on more and more ranks; speed-up and efficiency beside what is predicted, and ideal.

    python3 -m mmm.examples.scaling --ranks 1,2,4                        # weak: a rank's batch stays
    python3 -m mmm.examples.scaling --ranks 1,2,4 --strong               # the global batch stays
    python3 -m mmm.examples.scaling --ranks 4,8,64 --lines --outdir s            # lines for jobs; once they ran: draw

Start it without `launch`: each point is a run of a trainer that it launches, with a record of its own, OUTDIR/weak-4. A
point whose record is there, of the same command, is not run again. R(n) are the samples a second of n ranks, of the
fewest m::

      speed-up      m · R(n) / R(m)          ideal: n         efficiency: over n

      weak          a data-parallel rank keeps its batch: n times the work, ideally in the same time (Gustafson)
      strong        the global batch stays: the same work in 1/n of the time; what does not shrink limits it (Amdahl)

Waited is the share of a step that a rank was in collectives (dt - dt_own). Predicted is what `mmm plan` computes for
such a run, where the machine's rates are known: `mmm machine --measure` finds this one's.

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
    """Numbers of ranks, the fewest first."""
    strong: bool = False
    """The global batch stays. Default: weak scaling, where a data-parallel rank keeps its batch."""
    batch_size: int = 4
    """Samples a step: of a data-parallel rank; with --strong, of the global batch for each of the most ranks."""
    steps: int = 20
    """Steps of a run. The first two do not count."""
    program: str = "mmm.trainer.lm"
    flags: str = "--preset debug --dataset random --seq_length 256 --dim 256 --vocab_size 2048 --eval_batches 1"
    """Of the program: its model, its layout, its device. As one word: --flags="--preset gpt2 --tp 2"."""
    lines: bool = False
    """Print the line of each point that has no record yet, and run nothing: for jobs of a cluster."""
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
    """The program of a point, and its flags."""
    batch = ["--batch_size", str(config.batch_size)]
    if config.strong:
        batch = ["--global_batch_size", str(config.batch_size * max(config.rank_counts()))]
    line = ["python3", "-m", config.program, *shlex.split(config.flags), *batch, "--max_iters", str(config.steps)]
    return [*line, "--no-plots", "--overwrite", "--outdir", str(outdir / f"{config.kind}-{ranks}")]


def run_point(ranks: int, line: list[str]) -> None:
    """Launch a point; what it prints is in its log.txt. Raises SystemExit, with its exit code, where it fails."""
    # A rank of every point has as many threads: else one rank alone would have all cores of a CPU.
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
    points: dict[int, Point | None] = {}
    for ranks in config.rank_counts():
        line = program_line(config, ranks, outdir)
        points[ranks] = read_point(ranks, line)
        if points[ranks] is None and config.lines:
            print(shlex.join(["launch", "-n", str(ranks), *line]))
        elif points[ranks] is None:
            run_point(ranks, line)
            points[ranks] = read_point(ranks, line)
    known = [point for point in points.values() if point is not None]
    if known:
        print(table(known))
    missing = [ranks for ranks, point in points.items() if point is None]
    if missing:
        print(f"no record yet of {', '.join(map(str, missing))} ranks: once they have run, the same line draws")
        return
    picture = draw(known, f"{config.kind} scaling of {config.program}", outdir / f"{config.kind}.png")
    print(f"picture: {picture}")


if __name__ == "__main__":
    run_main(lambda: main(parse(Config, __doc__)))
