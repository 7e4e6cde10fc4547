"""What starting ranks costs on this machine: forked, spawned, by torchrun, by mpiexec.

    python3 -m mmm.examples.startup

PyTorch takes seconds of CPU time to import, and N ranks that each import it take N times that, on N cores or on fewer;
on a parallel file system they also ask it for the same ten thousand files, at the same time. `launch` imports once, and
forks the ranks from there::

      spawned, torchrun, mpiexec                     forked

      ├─ import ─┤ group │ rank 0                    ├─ import ─┼ group │ rank 0
      ├─ import ─┤ group │ rank 1                               ├ group │ rank 1
      ├─ import ─┤ group │ rank 2                               ├ group │ rank 2
      ├─ import ─┤ group │ rank 3                               ├ group │ rank 3

The program that is started imports what the examples do, makes the process group, and leaves. *seconds* run from the
start of the command to when the last rank was there; *CPU* is all that the command and its processes used, to their
end. Every way is measured at each number of ranks in turn, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mmm.errors import ConfigError
from mmm.examples import _startup_cost as measure
from mmm.history.curves import fitting_width, save_curves, terminal_curves
from mmm.layout import Layout
from mmm.runtime.ranks import whoami
from mmm.trainer.config.command_line import parse
from mmm.trainer.config.flags import run_main
from mmm.trainer.config.run import BaseOptions, check_effect
from mmm.trainer.run.core import Run
from mmm.trainer.run.record import add_row
from mmm.trainer.run.standard import start_run

PROGRAM = ["-m", "mmm.examples._startup_rank"]


@dataclass(frozen=True, kw_only=True)
class Config(BaseOptions):
    """Start-up, measured; nothing is trained."""

    ranks: tuple[int, ...] = (1, 2, 4, 8)
    ways: tuple[Literal["forked", "spawned", "torchrun", "mpiexec"], ...] = measure.WAYS  # type: ignore[assignment]
    repeats: int = 1
    """Starts of each; the median counts."""
    mpiexec: str | None = None
    """Which one to use, where there are several. Default: mpiexec."""
    plots: bool = True
    """Draw seconds against ranks at the end, as a picture in the run's folder."""

    def check(self) -> None:
        super().check()
        way = "--ways mpiexec", "nothing is started by it", "--ways forked mpiexec"
        check_effect("mpiexec" in self.ways, *way, mpiexec=self.mpiexec)


def sweep(
    run: Run, config: Config, ways: list[str], mpiexec: str, folder: str
) -> Iterator[tuple[int, dict[str, measure.Start]]]:
    """For each number of ranks, what each way took."""
    for ranks in config.ranks:
        found: dict[str, list[measure.Start]] = {way: [] for way in ways}
        for _ in range(config.repeats):
            for way in ways:
                found[way].append(measure.start(way, ranks, PROGRAM, mpiexec, folder))
                run.log.info("%d ranks, %s: %.2f s, %.2f CPU-s", ranks, way, *found[way][-1])
        yield ranks, {way: measure.Start(*map(median, zip(*each, strict=True))) for way, each in found.items()}


def growth(by_ranks: Mapping[int, Mapping[str, measure.Start]], way: str) -> float:
    """CPU-seconds that each further rank takes, from the fewest ranks to the most."""
    few, many = min(by_ranks), max(by_ranks)
    return (by_ranks[many][way].cpu - by_ranks[few][way].cpu) / max(many - few, 1)


def table(by_ranks: Mapping[int, Mapping[str, measure.Start]], ways: list[str], imported: float) -> str:
    """A line for each number of ranks; then what a further rank takes."""
    lines = ["     " + "".join(f"{way:>18}" for way in ways), "ranks" + f"{'seconds':>10}{'CPU-s':>8}" * len(ways)]
    lines += [
        f"{ranks:>5}" + "".join(f"{each[way].seconds:>10.2f}{each[way].cpu:>8.2f}" for way in ways)
        for ranks, each in by_ranks.items()
    ]
    if len(by_ranks) > 1:
        lines.append(f"one import takes {imported:.2f} CPU-s; a further rank, of that:")
        more = {way: growth(by_ranks, way) for way in ways}
        lines += [f"  {way:<9}{seconds:>6.2f} CPU-s, {seconds / imported:.1%}" for way, seconds in more.items()]
    return "\n".join(lines)


def draw(run: Run, by_ranks: Mapping[int, Mapping[str, measure.Start]], ways: list[str]) -> None:
    """Seconds and CPU-seconds against ranks: in the terminal, and as a picture."""
    seconds, cpu = ({way: [(ranks, each[way][i]) for ranks, each in by_ranks.items()] for way in ways} for i in (0, 1))
    print(terminal_curves(cpu, "CPU-seconds to start, against ranks", fitting_width()), flush=True)
    if run.outdir is not None and run.config.plots:
        picture = run.outdir / "plots" / "mplot" / "pngs" / "startup.png"
        run.log.info("picture: %s", save_curves({"start-up [s]": seconds, "CPU time [s]": cpu}, picture))


def train(config: Config) -> tuple[dict[int, dict[str, measure.Start]], float]:
    """What was found by number of ranks and way, and the CPU-seconds of one import."""
    if whoami().world_size > 1:
        raise ConfigError("this example starts ranks itself: run it as it is, `python3 -m mmm.examples.startup`")
    if not config.ranks or min(config.ranks) < 1 or not config.ways or config.repeats < 1:
        given = f"--ranks {config.ranks} --ways {config.ways} --repeats {config.repeats}"
        raise ConfigError(f"{given}: at least one of each, from 1")
    by_ranks: dict[int, dict[str, measure.Start]] = {}
    ways, mpiexec, note = [str(way) for way in config.ways], config.mpiexec or "mpiexec", ""
    if "mpiexec" in ways:
        flavour = measure.mpi_flavour(mpiexec)
        note = f"mpiexec is {flavour}'s"
        if flavour is None:
            note = f"mpiexec is left out: no {mpiexec} here that answers"
            ways = [way for way in ways if way != "mpiexec"]
            if not ways:
                raise ConfigError(
                    f"--ways mpiexec: there is no {mpiexec} here that answers; give --mpiexec the "
                    f"path of one, or other --ways"
                )
    with start_run("startup", config, Layout().fit(1)) as run, tempfile.TemporaryDirectory() as folder:
        if note:
            run.note(note)
        imported = measure.one_import(PROGRAM, config.repeats, folder)
        run.describe(one_import_cpu=imported, program=PROGRAM)
        for ranks, found in sweep(run, config, ways, mpiexec, folder):
            by_ranks[ranks] = found
            row = {f"{way}_{name}": value for way, each in found.items() for name, value in each._asdict().items()}
            add_row(run, {"ranks": ranks, **row})
        run.describe(cpu_of_a_further_rank={way: growth(by_ranks, way) for way in ways})
        run.log.info("\n%s", table(by_ranks, ways, imported))
        draw(run, by_ranks, ways)
    return by_ranks, imported


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
