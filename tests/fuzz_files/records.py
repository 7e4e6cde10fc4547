"""Files of a run's record and what programs write beside it; of machines; and what `launch` reads: hosts, programs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from fuzz_files.kinds import Kind
from mmm import history
from mmm.errors import UserError
from mmm.history.record.attempts import Attempt, attempt_of, make_room
from mmm.history.record.ending import read_config
from mmm.history.record.folder import JOURNAL
from mmm.history.record.journal import Header
from mmm.history.record.resume import Resume, check_over
from mmm.runtime import startup
from mmm_lab.cli import history as cli_history
from mmm_lab.cli import runs as cli_runs
from mmm_lab.cli import startup as cli_startup
from mmm_lab.cli.startup_logs import read_log
from mmm_lab.planner.machine_text import assumed, settings
from mmm_lab.planner.measured import machine_here
from mmm_lab.planner.network import peak_rate
from mmm_launch.errors import LaunchError
from mmm_launch.machines import find
from mmm_launch.machines.machine import read
from mmm_launch.program.preloads import preloads
from mmm_launch.program.target import Target, read_source
from mmm_launch.spec import hosts, slurm
from support.processes import leave_as_killed

ROWS = 6
# The ranks of a record as launch describes them.
RANKS = [{"rank": rank, "host": f"n{rank}", "local_rank": 0, "pid": 10 + rank, "axis_tp": rank} for rank in range(2)]
STARTUP = startup.as_record("launch", [{name: 1.7e9 + mark for mark, name in enumerate(startup.MARKS)}] * 2)
THIS = Attempt("launch-1", 1)


def make_record(folder: Path) -> None:
    """Of a run that has finished, or was killed if its journal is still there."""
    run = folder / "run"
    run.mkdir()
    config = {"module": "lm", "options": {"max_iters": 6, "epochs": None}, "ranks": RANKS, "world_size": 2}
    config |= {"startup": STARTUP, "attempt": {"of": "launch-1", "number": 0}, "mfu": {"flops": 1e12}}
    history.write_config(run, config)
    with history.History(run, ranks=RANKS, flush_every=1) as writer:
        for row in range(ROWS):
            writer.update({"iter": row, "loss": 5.0 - row / 10, "dt": 0.1}, {"dt": [0.1, 0.2]})
    (run / "plots").mkdir()
    (run / "plots" / "files.json").write_text(json.dumps(["plots/loss.txt"]))
    (run / "plots" / "loss.txt").write_text("plot")


def make_journal(folder: Path) -> None:
    """Of a run that was killed."""
    run = folder / "run"
    run.mkdir()
    writer = history.History(run, ranks=RANKS, flush_every=1)
    for row in range(ROWS):
        writer.update({"iter": row, "loss": 5.0 - row / 10}, {"dt": [0.1, 0.2 + row]})
    leave_as_killed(writer)
    history.write_config(run, {"module": "lm", "startup": STARTUP})


def read_journal(folder: Path) -> Any:
    record = read_dataset(folder)
    history.finalize(folder / "run")
    return record, history.load(folder / "run")


def read_record(folder: Path) -> Any:
    """What `mmm history`, `mmm startup`, and a program that goes on with a record do."""
    run = folder / "run"
    print(history.state(run), attempt_of(read_config(run)))
    cli_history.main([str(run)])
    cli_startup.main([str(run)])
    check_over(run, None, True)
    return make_room(run, THIS)


def read_dataset(folder: Path) -> Any:
    run = folder / "run"
    record = history.load(run)
    print(history.state(run))
    cli_history.main([str(run)])
    Resume(3, {"step": 3}).reopen(run, Header(RANKS, {}))
    return record


def make_many(folder: Path) -> None:
    """A run that has finished, one that was killed, and one that stays as it is."""
    about = {"module": "lm", "name": "wide", "ranks": RANKS, "options": {"lr": 0.1}, "layout": "tp2", "steps": ROWS}
    about |= {"started": "2026-11-26T09:00:00+00:00", "ended": "2026-11-26T10:00:00+00:00", "versions": {"torch": "2"}}
    about |= {"repository": {"commit": "ab" * 20, "changed": 1}}
    for name in ("finished", "killed", "sound"):
        (folder / name).mkdir()
        history.write_config(folder / name, about)
        writer = history.History(folder / name, ranks=RANKS, flush_every=1)
        for row in range(ROWS):
            times = {"dt": [0.5, 0.5], "dt_own": [0.1, 0.5]}
            writer.update({"iter": row, "loss": 5.0 - row / 10, "tps": 9.0}, times)
        leave_as_killed(writer) if name == "killed" else writer.close()


def read_many(folder: Path) -> Any:
    """What `mmm runs`, `history` and `history --ranks` do; each refuses for itself."""
    refused = None
    finished, killed = (str(folder / name) for name in ("finished", "killed"))
    for command, argv in (
        (cli_runs, [str(folder), "--sort", "started"]),
        (cli_history, [finished]),
        (cli_history, [killed, "--ranks"]),
    ):
        try:
            command.main(argv)
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused


def read_plots(folder: Path) -> Any:
    """Overwritten, a record loses its own files, and no others."""
    return history.prepare(folder / "run", "lm", True)


LOG = "GPT1T_4L_z1/job-nhosts1-ngpu2-a.log"


def make_log(folder: Path) -> None:
    lines = ["Job started at: 2023-11-02-183323 on x3005", "[2023-11-02 18:34:00,000] [INFO] step=0, loss=5"]
    (folder / LOG).parent.mkdir()
    (folder / LOG).write_text("\n".join(lines) + "\n")


def read_logs(folder: Path) -> Any:
    print(read_log(folder / LOG))
    return cli_startup.main([str(folder / LOG)])


# Every kind of file of a run's folder: how it is made, and how it is read.
KINDS = (
    Kind("record-journal", make_journal, (f"run/{JOURNAL}",), read_journal),
    Kind("record-config", make_record, ("run/config.json",), read_record),
    Kind("record-dataset", make_record, ("run/*.h5",), read_dataset),
    Kind("records-many", make_many, ("finished/config.json", "finished/*.h5", "killed/*.json*"), read_many),
    Kind("record-plots", make_record, ("run/plots/*.json",), read_plots),
    Kind("log", make_log, (LOG,), read_logs, trusted=True),
)


BUILT_IN = ("perlmutter", "polaris")


def make_machine(folder: Path) -> None:
    (folder / "machine.json").write_bytes((find.BUILT_IN / "perlmutter.json").read_bytes())


def make_measured(folder: Path) -> None:
    (folder / "mmm").mkdir()
    about = json.loads((find.BUILT_IN / "laptop.json").read_text()) | {"hosts": 1}
    (folder / "mmm" / f"machine-{socket.gethostname()}.json").write_text(json.dumps(about))


def read_machine(folder: Path) -> Any:
    machine = read(folder / "machine.json").changed({"hosts": 2})
    return machine.bandwidth(2, True), peak_rate(machine, "bf16"), assumed(machine)


def read_measured(folder: Path) -> Any:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return machine_here("cpu", None, 1, 2, 2)


def make_launch_machines(folder: Path) -> None:
    for name in BUILT_IN:
        (folder / f"{name}.json").write_bytes((find.BUILT_IN / f"{name}.json").read_bytes())


def read_launch_machines(folder: Path) -> Any:
    environ = {find.VARIABLE: str(folder), "HOME": str(folder), "NERSC_HOST": "perlmutter"}
    machine, why = find.find(environ)
    print(machine, why)
    return machine.variables(), machine.srun_arguments(), settings(machine)


def make_hosts(folder: Path) -> None:
    (folder / "hosts").write_text("# ours\nn1 slots=4\nn2:4\nn3\nn3\n")


def read_hosts(folder: Path) -> Any:
    return hosts.parse_file(folder / "hosts")


def make_slurm(folder: Path) -> None:
    lines = [
        "SLURM_JOB_ID=7",
        "SLURM_JOB_NODELIST=n[01-03,7],gpu3",
        "SLURM_NTASKS=8",
        "SLURM_TASKS_PER_NODE=2(x3),1(x2)",
    ]
    (folder / "environ").write_text("\n".join([*lines, "SLURM_GPUS_ON_NODE=4", "SLURM_JOB_END_TIME=1700000000\n"]))


def read_slurm(folder: Path) -> Any:
    """Variables, which a file has for the sake of the fuzzer."""
    try:
        content = (folder / "environ").read_bytes()[: 1 << 17]
    except OSError:
        raise LaunchError("no variables") from None
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    environ = dict(line.split("=", 1) for line in lines if "=" in line)
    return slurm.detect(environ), slurm.cpus_of_a_node(environ)


def make_program(folder: Path) -> None:
    (folder / "train.py").write_text("# -*- coding: utf-8 -*-\nimport json\nfrom mmm.data import text\nimport helper\n"
                                     "if __name__ == '__main__':\n    import torch\n")  # fmt: skip
    (folder / "helper.py").write_text("try:\n    import numpy\nexcept ImportError:\n    pass\n")


def read_program(folder: Path) -> Any:
    return preloads(Target("script", str(folder / "train.py"))), read_source(folder / "helper.py")


KINDS += (
    Kind("plan-machine", make_machine, ("machine.json",), read_machine, sparse=True),
    Kind("plan-measured", make_measured, ("mmm/*.json",), read_measured, sparse=True),
    Kind("launch-machine", make_launch_machines, ("*.json",), read_launch_machines, sparse=True),
    Kind("hosts", make_hosts, ("hosts",), read_hosts, trusted=True),
    Kind("slurm-variables", make_slurm, ("environ",), read_slurm, trusted=True),
    Kind("program", make_program, ("*.py",), read_program, trusted=True),
)
