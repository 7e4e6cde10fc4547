"""One run on one rank: device, process group, log, and on rank 0 the record, from start to a clean end.

::

    with start_run("fsdp_tp", config, layout) as run:
        ...
        for step in range(steps):
            ...
            run.step(step, loss)
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from mmm import history
from mmm.contract import LINE_VARIABLE, SITE_VARIABLE
from mmm.errors import DeviceError
from mmm.history.attempts import this_attempt
from mmm.history.trackers import Tracked
from mmm.layout import Layout
from mmm.parallel.dp.wrapped import ignore_views
from mmm.parallel.memory.footprint import Footprint, check_fits
from mmm.plan.observer import observed
from mmm.runtime import startup
from mmm.runtime.agreement import agree
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock, event_class
from mmm.runtime.device import choose_device, choose_precision, full_float32, left_out
from mmm.runtime.hang import HangWatch
from mmm.runtime.log import logging_to
from mmm.runtime.memory import start_of_peak
from mmm.runtime.process_group import locate, process_group
from mmm.runtime.ranks import DRY_RUN, command_line, whoami
from mmm.runtime.seed import seed_start
from mmm.runtime.sockets import use_short_socket_folder
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.runtime.waits import timed_waits
from mmm.trainer import resume
from mmm.trainer.facts import ADVICE, all_ranks, facts_of_run
from mmm.trainer.options import BaseOptions
from mmm.trainer.prediction import predict_run, report_prediction
from mmm.trainer.report import rank_table, report_end
from mmm.trainer.resolve import Resolved
from mmm.trainer.resume import RunFolder
from mmm.trainer.run import Run

BROKEN_EXIT = 1  # of a run with --break, whatever it found


@contextmanager
def start_run(
    module: str,
    options: BaseOptions,
    resolved: Resolved | Layout,
    data: Mapping[str, Any] | None = None,
    footprint: Footprint | None = None,
) -> Iterator[Run]:
    """A run, for the length of a ``with`` block: everything up before it, the record complete and on disk after it.

    Everything that can be refused without the other ranks is refused before they meet; then the ranks compare what has
    to be equal on all of them (`mmm.trainer.facts`), and rank 0 prepares the run's folder, before any process group.

    Args:
        module: short name, for the log and the default folder.
        resolved: what has been decided; or, of a program that has no model, the layout, fitted to the number of ranks,
            and beside it data and footprint.
        data: what the record keeps of the data, None for a program that reads none. Its name (``dataset``) and hash
            (``sha256``) have to be equal on all ranks; what it has to tell the user (``note``) is logged.
        footprint: what the ranks will hold; None for next to nothing.

    Raises:
        ConfigError: it cannot fit into the memory here; or the ranks differ, and then on every rank.
        RecordError: the folder cannot be prepared; on every rank.
        SystemExit: with ``--break``, once the run has ended and its record is complete.
    """
    rank = locate(whoami(), options.timeout)
    device = choose_device(options.device, rank)
    if device.type == "mps" and not options.RUNS_ON_MPS:
        raise DeviceError(
            f"--device mps: {module} makes groups by PyTorch's own calls, which MPS has none for; use --device cpu, or "
            f"one of mmm.trainer.lm, mmm.trainer.vit and mmm.trainer.fsdp"
        )
    precision = choose_precision(options.dtype, device)
    layout = resolved.layout if isinstance(resolved, Resolved) else resolved
    if isinstance(resolved, Resolved):
        data, footprint = resolved.data.describe(), resolved.footprint
    dry = rank.source == DRY_RUN
    if footprint is not None and not dry:
        check_fits(footprint, layout, rank, device, precision)
    facts = facts_of_run(module, options, layout, device, precision, data, rank)
    prepared: list[RunFolder] = []

    def meet(store: dist.Store) -> None:
        agree(store, rank, facts, ADVICE, lambda: prepared.append(resume.prepare(module, options, this_attempt())))

    seed_start(options.seed, layout.dp_coordinate(rank.rank))
    times = startup.ready()
    clock = StepClock(device, PARTS if layout.pp == 1 else PIPELINE_PARTS)
    group = observed(process_group(rank, device, options.timeout, meet), clock, layout, precision, resolved)
    watch: Any = nullcontext() if dry else HangWatch(rank, options.timeout, clock)
    with group, watch, ExitStack() as stack:
        stack.enter_context(full_float32(precision))
        stack.enter_context(ignore_views())
        if not (dry or event_class(device) or getattr(options, "compile", False)):  # compiled code waits in C++
            stack.enter_context(timed_waits(clock))
        outdir = prepared[0].outdir if prepared else None  # on rank 0
        speaker, file = 1 if dry else rank.rank, outdir / "log.txt" if outdir else None
        log = stack.enter_context(logging_to(speaker, file, options.log_all_ranks))
        ranks = all_ranks(rank, device, layout)
        times.group = time.time()
        config: dict[str, Any] = {
            "module": module,
            "command": command_line(),
            "options": dataclasses.asdict(options),
            "layout": str(layout),
            "mesh": layout.sizes,
            "precision": {"name": precision.name, "reason": precision.reason},
            "started_by": rank.source,
            "launch": os.environ.get(LINE_VARIABLE),
            "site": json.loads(os.environ.get(SITE_VARIABLE, "null")),
            "attempt": attempt._asdict() if (attempt := this_attempt()) else None,
            "python": sys.executable,
            "versions": history.versions(),
            "hosts": sorted({about["host"] for about in ranks}),
            "ranks": ranks,
            "notes": [],
        }
        if data is not None:
            config["data"] = data
        if prepared and prepared[0].mfu is not None:
            config["mfu"] = prepared[0].mfu
        wish = stack.enter_context(stop_signal()) if options.checkpoint_every is not None else StopSignal()
        # Without its folder until it is known to go on: what refuses it leaves the record that is there as it is.
        run = Run(options, rank, layout, device, precision, clock, log, None, ranks, startup=times, stop=wish)
        run.describe(**config)
        log.info(
            "%d ranks (%s), layout %s, %s, %s (%s)\n%s",
            rank.world_size,
            rank.source,
            layout,
            device.type,
            precision.name,
            precision.reason,
            rank_table(ranks) if ranks else "(rank 0 has the table)",
        )
        notes = (left_out(options.device, device), use_short_socket_folder(), prepared[0].note if prepared else "")
        for note in filter(None, notes):
            run.note(note)
        if data is not None and data.get("note"):  # another data set stands in for the one asked for, say
            run.note(data["note"])
        if isinstance(resolved, Resolved):
            if rank.is_main or options.log_all_ranks:
                log.info("model:\n%s", resolved.summary())
            run.describe(**resolved.describe())
            if rank.is_main and not dry:
                run.memory_before, run.predict = start_of_peak(device), partial(predict_run, run, resolved)
            for note in resolved.notes:
                run.note(note)
            resume.choose(run, prepared[0] if prepared else None, module, resolved)
        run.outdir = outdir
        run.describe(**run.config)
        if outdir is None:
            with watch:
                yield run
                run.record_startup()  # of a program that has no steps
        else:
            goes_on = resume.record_goes_on(prepared[0], run.origin, str(layout))
            tracked = Tracked(options.tracker, outdir, {"command": command_line(), "layout": str(layout)})
            record = history.History(
                outdir, ranks=ranks, flush_every=options.flush_every, resume=goes_on, tracker=tracked
            )
            with record as run.record, watch:
                yield run
                run.record_startup()
            if len(run.record):
                report_end(run, outdir)
                report_prediction(run)
        if options.break_ is not None:
            dist.barrier()  # rank 0 has written its record before an exit code ends the run
    if options.break_ is not None:  # on every rank
        raise SystemExit(BROKEN_EXIT)
