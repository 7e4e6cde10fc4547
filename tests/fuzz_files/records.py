"""Files of a run's record and what programs write beside it: journal, config.json, dataset, plots, traces, logs."""

from __future__ import annotations

import json
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
from support.processes import leave_as_killed

ROWS = 6
RANKS = [{"rank": rank, "host": f"n{rank}", "local_rank": 0, "pid": 10 + rank, "axis_tp": rank} for rank in range(2)]
STARTUP = startup.as_record("launch", [[1.7e9 + mark for mark in range(len(startup.MARKS))]] * 2, [{"torch": 0.5}] * 2)
THIS = Attempt("launch-1", 1)


def make_record(folder: Path) -> None:
    """Of a run that has finished, or was killed if its journal is still there."""
    run = folder / "run"
    run.mkdir()
    config = {"module": "lm", "options": {"max_iters": 6, "epochs": None}, "ranks": RANKS, "world_size": 2}
    config |= {"startup": STARTUP, "attempt": {"of": "launch-1", "number": 0}, "mfu": {"flops": 1e12}}
    history.write_config(run, config)
    with history.History(run, ranks=RANKS, flush_every=1) as kept:
        for row in range(ROWS):
            kept.update({"iter": row, "loss": 5.0 - row / 10, "dt": 0.1}, {"dt": [0.1, 0.2]})
    (run / "plots").mkdir()
    (run / "plots" / "files.json").write_text(json.dumps(["plots/loss.txt"]))
    (run / "plots" / "loss.txt").write_text("plot")


def make_journal(folder: Path) -> None:
    """Of a run that was killed."""
    run = folder / "run"
    run.mkdir()
    kept = history.History(run, ranks=RANKS, flush_every=1)
    for row in range(ROWS):
        kept.update({"iter": row, "loss": 5.0 - row / 10}, {"dt": [0.1, 0.2 + row]})
    leave_as_killed(kept)
    history.write_config(run, {"module": "lm", "startup": STARTUP})


def read_journal(folder: Path) -> Any:
    found = read_dataset(folder)
    history.finalize(folder / "run")
    return found, history.load(folder / "run")


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
    found = history.load(run)
    print(history.state(run))
    cli_history.main([str(run)])
    Resume(3, {"step": 3}).reopen(run, Header(RANKS, {}))
    return found


def make_many(folder: Path) -> None:
    """A run that has finished, one that was killed, and one that stays as it is."""
    about = {"module": "lm", "name": "wide", "ranks": RANKS, "options": {"lr": 0.1}, "layout": "tp2", "steps": ROWS}
    about |= {"started": "2026-11-26T09:00:00+00:00", "ended": "2026-11-26T10:00:00+00:00", "versions": {"torch": "2"}}
    about |= {"repository": {"commit": "ab" * 20, "changed": 1}}
    for name in ("finished", "killed", "sound"):
        (folder / name).mkdir()
        history.write_config(folder / name, about)
        kept = history.History(folder / name, ranks=RANKS, flush_every=1)
        for row in range(ROWS):
            times = {"dt": [0.5, 0.5], "dt_own": [0.1, 0.5]}
            kept.update({"iter": row, "loss": 5.0 - row / 10, "tps": 9.0}, times)
        leave_as_killed(kept) if name == "killed" else kept.close()


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


KINDS = (
    Kind("record-journal", make_journal, (f"run/{JOURNAL}",), read_journal),
    Kind("record-config", make_record, ("run/config.json",), read_record),
    Kind("record-dataset", make_record, ("run/*.h5",), read_dataset),
    Kind("records-many", make_many, ("finished/config.json", "finished/*.h5", "killed/*.json*"), read_many),
    Kind("record-plots", make_record, ("run/plots/*.json",), read_plots),
    Kind("log", make_log, (LOG,), read_logs, trusted=True),
)
