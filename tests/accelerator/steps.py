"""Steps of the shared training loop on devices that are not there. A program: test_steps.py reads its answers.

    python steps.py LIBRARY OUTPUT '{"cuda": [CASE, …], "xpu": [CASE, …]}'

A case: model and layout, and fields of `ParityCase` and `Techniques`. OUTPUT: a JSON object a line, with what went
wrong or the counts of a step without and of one with a row.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

LIBRARY, OUTPUT, CASES = sys.argv[1:]
# Before torch, which asks at its import which devices there are.
ctypes.CDLL(str(Path(importlib.util.find_spec("torch").origin).parent / "lib/libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(LIBRARY)

import warnings  # noqa: E402
from dataclasses import replace  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device import COUNTS, NETWORK, fake_tensors, install, process_group  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402

from mmm.data import Batch  # noqa: E402
from mmm.nn.attention import Documents  # noqa: E402
from mmm.nn.experts import MixtureOfExperts, has_experts  # noqa: E402
from mmm.nn.meta import meta_parameters  # noqa: E402
from mmm.optim.adamw import make_optimizer  # noqa: E402
from mmm.parallel import parallel_model  # noqa: E402
from mmm.parallel.mesh import build_mesh  # noqa: E402
from mmm.parallel.parallel_model import ParallelModel  # noqa: E402
from mmm.parallel.pp import pipeline  # noqa: E402
from mmm.parallel.pp.pipeline import TimedStage  # noqa: E402
from mmm.parallel.pp.stages import take_stage  # noqa: E402
from mmm.run import options as groups  # noqa: E402
from mmm.run.comm import TorchComm  # noqa: E402
from mmm.run.folder import Folder  # noqa: E402
from mmm.run.run import Run  # noqa: E402
from mmm.runtime.clock import OWN, PARTS, PIPELINE_PARTS, StepClock  # noqa: E402
from mmm.runtime.device import Precision  # noqa: E402
from mmm.runtime.log import get_logger  # noqa: E402
from mmm.runtime.ranks import Rank  # noqa: E402
from mmm.runtime.waits import timed_waits  # noqa: E402
from mmm.traffic.count import count_traffic  # noqa: E402
from mmm_lab.parity import models  # noqa: E402
from mmm_lab.parity.layouts import ParityCase, canonical  # noqa: E402
from mmm_lab.parity.subject import make_batch, prepare  # noqa: E402
from support.loop import fit  # noqa: E402
from support.streams import Event, Stream  # noqa: E402

# A row is due in every second step.
ROWS = 2
# seconds
LATE = 5.0
# At most, where they are no stages of a pipeline: a third does what the second does.
LAYERS = 2
# Parameters in float32, computation in bfloat16.
BF16 = Precision("bf16", torch.float32, torch.bfloat16)


class Enough(Exception):
    """All steps that are counted have been made."""


class MadeUp:
    """The same batch every time; when the next one is asked for, what the last step has done is kept.

    The seconds of three rows are kept as well, of two steps each. In the second row the other ranks are late for each
    collective, in the third this one is late.
    """

    def __init__(self, batch, traffic):
        self.batch = batch
        self.traffic = traffic
        self.seen = []
        # Of a step without a row.
        self.events = 0

    def from_step(self, first):
        # The first makes the optimizer's state; then one without and one with a row.
        for step in range(8):
            if 1 <= step <= 3:
                self.seen.append((dict(COUNTS.of), self._collectives()))
            if step == 3:
                NETWORK.late = LATE
            if step == 5:
                NETWORK.late = 0.0
                Stream.current.work(LATE)
            if step == 7:
                raise Enough
            if step == 1:
                Event.made = 0
            if step == 2:
                self.events = Event.made
            COUNTS.of.clear()
            self.traffic.entries.clear()
            yield self.batch

    def _collectives(self):
        calls = {}
        for (_, operation), entry in self.traffic.entries.items():
            calls[operation] = calls.get(operation, 0) + entry.calls
        return calls


def shaped(ready, inputs):
    """In place of `TimedStage`: rank 0's stage, with the shapes that ranks tell each other in the first step."""
    tokens = inputs[: len(inputs) // ready.partition.microbatches]
    with torch.device("meta"):
        module = take_stage(ready.parity.model(), ready.partition.parts, ready.partition.stages[0])
    hidden = module.to("meta")(tokens.to("meta"))

    def make(module, stage_index, count, device, group):
        output = torch.empty_like(hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
        return TimedStage(module, stage_index, count, device, tokens.to(device), output, group=group)

    return make


def take_meta_stage(*samples_of):
    """In place of `take_stage`, which would copy what is on the meta device to FakeTensors."""
    with unset_fake_temporarily():
        return take_stage(*samples_of)


def noted(mesh, batched):
    """In place of `batch_isend_irecv`: counts what goes through which group of a pipeline."""
    pairs = {group: pair for pair, group in mesh.p2p.items()}

    def note(ops):
        for op in ops:
            COUNTS.add(f"{op.op.__name__} {pairs.get(op.group, 'other')}")
        return batched(ops)

    return note


def of_few_layers(parity):
    def model():
        full = parity.model()
        if getattr(getattr(full, "config", None), "n_layers", 0) <= LAYERS:
            return full
        return type(full)(replace(full.config, n_layers=LAYERS))

    return replace(parity, model=model)


def as_float32(tensor):
    """Images and numbers as a model in float32 gets them; tokens and classes stay."""
    return tensor.float() if tensor.is_floating_point() else tensor


def counted(kind, names):
    """What a rank does in a step without a row, and in one with."""
    fields = dict(names)
    techniques = {name: fields.pop(name) for name in ("offload",) if name in fields}
    optimizer = fields.pop("optimizer", "adamw")
    case = ParityCase(**{**fields, "layout": canonical(fields["layout"])})
    parity = models.find(case.model)
    device = torch.device(kind, 0)
    if "pp" not in case.sizes:
        parity = of_few_layers(parity)
    ready = prepare(parity, case)
    rank = Rank(0, case.ranks, 0, 1, "test")
    batch = make_batch(parity, case.data, ready.samples)
    inputs, targets = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in (batch["inputs"], batch["targets"])
    )
    local = ready.samples // ready.layout.dp
    with process_group(case.ranks):
        mesh = build_mesh(ready.layout, kind, experts=has_experts(parity.model()))
        # Made here: its ranks are numbers, which no FakeTensor has.
        if ready.layout.cp > 1:
            mesh.split_cp(ready.case.ulysses_size(ready.layout.cp))
        with meta_parameters():
            module = parity.model()
        clock = StepClock(device, PARTS if ready.layout.pp == 1 else PIPELINE_PARTS)
        seconds = kept_seconds(clock)
        stage = shaped(ready, inputs[:local]) if ready.layout.pp > 1 else TimedStage
        with contextlib.ExitStack() as stack:
            stack.enter_context(timed_waits(clock))
            stack.enter_context(fake_tensors(kind))
            traffic = stack.enter_context(count_traffic(mesh))
            stack.enter_context(patch.object(parallel_model, "take_stage", take_meta_stage))
            stack.enter_context(patch.object(pipeline, "TimedStage", stage))
            stack.enter_context(patch.object(dist, "batch_isend_irecv", noted(mesh, dist.batch_isend_irecv)))
            # What has elements cannot go to a device that is not there.
            for owner in module.modules():
                owner._buffers.update(
                    {name: buffer.clone() for name, buffer in owner._buffers.items() if buffer is not None}
                )
            parallel = ParallelModel(
                module,
                parity.plan(),
                mesh,
                BF16,
                replace(ready.case, **techniques),
                ready.partition,
                device=device,
                seed=0,
                lap=clock.model_lap,
            )
            comm = TorchComm()
            options = groups.RunFlags(log_every=ROWS)
            comm.rank = rank
            folder = Folder()
            # Of rank 0, which reads its rows.
            folder.path = Path("none")
            run = Run("test", options, options, None, rank, ready.layout, device, BF16, comm, clock, [], folder)
            documents = Documents.of(batch["starts"][:local]) if "starts" in batch else None
            samples_of = Batch(inputs[:local], targets[:local], targets.numel(), documents=documents)
            task = MadeUp(samples_of.to(device), traffic)
            updates = make_optimizer(optimizer, parallel.parameters(), 1e-3)
            job = SimpleNamespace(steps=100, global_batch_size=1, techniques=parallel.techniques)
            with contextlib.suppress(Enough):
                fit(run, parallel, updates, job, batches=task, max_norm=1.0)
    _, without, with_row = task.seen
    layers = sum(isinstance(layer, MixtureOfExperts) for layer in parallel.modules[0].modules())
    forwards = layers * parallel.microbatch_count
    answer = {"without": without, "with": with_row, "groups": len(updates.param_groups), "expert_forwards": forwards}
    # One of the first row, which includes warm-up.
    rows = [{"seconds": row["dt"] * ROWS, "own": row[OWN] * ROWS} for row in seconds[1:]]
    return {**answer, "microbatches": parallel.microbatch_count, "rows": rows, "late": LATE, "events": task.events}


def kept_seconds(clock):
    """What the clock's `read` returns from now on, in a list."""
    read, seconds = clock.read, []

    def keep():
        seconds.append(read())
        return seconds[-1]

    clock.read = keep
    return seconds


def in_child(function, *samples_of):
    """A process that is forked for it. Returns its number."""
    if child := os.fork():
        return child
    function(*samples_of)
    os._exit(0)


def run_case(kind, case):
    try:
        answer = counted(kind, case)
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with open(OUTPUT, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "case": case, **answer}) + "\n")


def run_all(kind, cases):
    install(kind)
    get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")
    # Each in a process of its own: PyTorch keeps names of groups, which the next case gives again.
    for case in cases:
        os.waitpid(in_child(run_case, kind, case), 0)


def main():
    for child in [in_child(run_all, *case) for case in json.loads(CASES).items()]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
