"""What a rank pays for the number of ranks: one rank's program on PyTorch's fake process group, on 1,024 to 102,400.

    python benchmarks/scale.py [--ranks 1024 10240 102400] [--layout hsdp·tp8 …] [--png FILE] [--json FILE]

For each layout and size, in a process of its own: the mesh, a Transformer parallelized over it, and steps of it
(forward, backward, clipping, AdamW; with a row due and without) on tensors without elements. Nothing is sent;
seconds are CPU seconds of PyTorch's and this package's own work. Exit code 1 where a step's Python memory grows by more
than 5 % from the least to the most ranks.
"""

import argparse
import gc
import json
import os
import platform
import resource
import sys
import time
import traceback
import tracemalloc
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
# The device that is not there, and what it is made of.
sys.path += [str(TESTS / "accelerator"), str(TESTS)]

import torch  # noqa: E402
from device import Count, numpy_zeros, outside_fake_mode, process_group  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from mmm.data import Batch  # noqa: E402
from mmm.history.plots.style import new_figure, save, style  # noqa: E402
from mmm.layout import Layout, Techniques  # noqa: E402
from mmm.models.llama.model import Transformer, TransformerConfig  # noqa: E402
from mmm.models.llama.plan import transformer_plan  # noqa: E402
from mmm.nn.meta import meta_parameters  # noqa: E402
from mmm.optim.adamw import make_optimizer  # noqa: E402
from mmm.palette import LIGHT, SERIES  # noqa: E402
from mmm.parallel import parallel_model  # noqa: E402
from mmm.parallel.mesh import Mesh, build_mesh  # noqa: E402
from mmm.parallel.partition import partition_model  # noqa: E402
from mmm.run import options as groups  # noqa: E402
from mmm.run.comm import TorchComm  # noqa: E402
from mmm.run.folder import Folder  # noqa: E402
from mmm.run.run import Run  # noqa: E402
from mmm.runtime.clock import StepClock  # noqa: E402
from mmm.runtime.device import Precision  # noqa: E402
from mmm.runtime.log import get_logger  # noqa: E402
from mmm.runtime.ranks import Rank  # noqa: E402

# Name → the layout on a number of ranks.
LAYOUTS = {
    "fsdp·tp8": lambda ranks: Layout(tp=8),
    "hsdp·tp8": lambda ranks: Layout(dp_replicate=ranks // 64, dp_shard=8, tp=8),
    "hsdp·cp2·tp4": lambda ranks: Layout(dp_replicate=ranks // 64, dp_shard=8, cp=2, tp=4),
    "hsdp·ep8": lambda ranks: Layout(dp_replicate=ranks // 64, dp_shard=64, ep=8),
}
DEFAULT = ("hsdp·tp8", "hsdp·ep8")
RANKS = (1024, 10240, 102400)
# Of a step's memory in Python: on the most ranks, to that on the fewest.
ALLOWED = 1.05
CPU = torch.device("cpu")
FP32 = Precision("fp32", torch.float32, torch.float32)
REPEATS = 3
# A rank's batch: (samples, tokens of each).
TOKENS = (8, 64)


def resident() -> int:
    """The most bytes that this process has had in memory."""
    # Linux counts it in KiB.
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def parallelize(mesh: Mesh, mode: FakeTensorMode) -> parallel_model.ParallelModel:
    """A Transformer of 2 layers: on the meta device, as a run has it; its memory is fake."""
    layout = mesh.layout
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 128}
    if layout.ep > 1:
        sizes["n_experts"] = 8
    with meta_parameters():
        model = Transformer(TransformerConfig(**sizes))
    plan = transformer_plan()
    techniques = Techniques()
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    partition = partition_model(model, plan, layout, techniques, tokens)
    materialize = parallel_model.materialize

    # Weights have shapes and no numbers: drawing these would be most of what is measured.
    def fake(*arguments, **named):
        with mode:
            materialize(*arguments, **named)

    parallel_model.materialize = fake
    return parallel_model.ParallelModel(model, plan, mesh, FP32, techniques, partition, device=CPU, seed=0)


def measure(name: str, ranks: int) -> dict[str, float]:
    """One rank's figures: CPU seconds, resident bytes, and the bytes that Python needs at the peak of a step."""
    for method in ("__init__", "__getitem__", "_flatten", "_create_sub_mesh", "from_group", "get_local_rank", "size"):
        outside_fake_mode(method)
    FakeTensor.numpy = numpy_zeros
    layout = LAYOUTS[name](ranks).fit(ranks)
    costs: dict[str, float] = {}

    def once(kind, work):
        before = resident()
        began = time.process_time()
        result = work()
        costs[kind] = time.process_time() - began
        costs[f"{kind} bytes"] = resident() - before
        return result

    with process_group(ranks):
        mesh = once("mesh", lambda: build_mesh(layout, "cpu", experts=layout.ep > 1))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = once("model", lambda: parallelize(mesh, mode))
        with mode, Count("cpu"):
            costs |= measure_steps(model, layout, ranks)
    return costs


def measure_steps(model: parallel_model.ParallelModel, layout: Layout, ranks: int) -> dict[str, float]:
    """Of each kind of step: CPU seconds, and the bytes that Python needs at its peak."""
    optimizer = make_optimizer("adamw", model.parameters(), 1e-3)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    batch = Batch(tokens, tokens, layout.dp * tokens.numel())
    clock = StepClock(CPU)
    who = Rank(0, ranks, 0, 1, "benchmark")
    comm = TorchComm()
    comm.rank = who
    options = groups.RunFlags()
    record = Folder()
    run = Run("benchmark", options, options, None, who, layout, CPU, FP32, comm, clock, [], record)

    def step(due: bool, folder: Path | None = None) -> None:
        # Rank 0 has one, and reads its rows.
        record.path = folder
        clock.start()
        loss = model.forward_backward(batch)
        model.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.balance_experts(measured=due)
        clock.lap("dto")
        if due:
            run.row({"iter": 0}, {"loss": loss}, samples=1)

    # Kind of step → its arguments.
    kinds = {
        "step": (False,),
        "step with row": (True,),
        "step with row on rank 0": (True, Path("none")),
    }
    # After these caches are filled, and the optimizer has its state.
    for arguments in kinds.values():
        step(*arguments)
    costs = {}
    for kind, arguments in kinds.items():
        costs[kind] = min(_cpu_seconds(step, *arguments) for _ in range(REPEATS))
    tracemalloc.start()
    for kind, arguments in kinds.items():
        step(*arguments)
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step(*arguments)
        _, peak = tracemalloc.get_traced_memory()
        costs[f"{kind} bytes"] = peak - before
    return costs


def _cpu_seconds(work, *arguments) -> float:
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


def in_a_process(name: str, ranks: int) -> dict:
    """The figures of `measure`, in a process that is forked for it."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            row = {"layout": name, "ranks": ranks, **measure(name, ranks)}
            os.write(writes, json.dumps(row).encode())  # fits into a pipe
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        sys.exit(f"{name} on {ranks} ranks failed")
    return json.loads(answer)


# Title, the columns of a row that it shows, and what they are divided by.
PANELS = (
    ("a step, CPU seconds", ("step", "step with row", "step with row on rank 0"), 1),
    ("a step, Python's MB at its peak", ("step bytes", "step with row bytes", "step with row on rank 0 bytes"), 1e6),
    ("once: CPU seconds", ("mesh", "model"), 1),
    ("once: MB of memory", ("mesh bytes", "model bytes"), 1e6),
)


def draw(rows: list[dict], file: Path) -> None:
    """A colour a layout, a dash a kind of step."""
    from matplotlib.lines import Line2D

    layouts = dict(zip(dict.fromkeys(row["layout"] for row in rows), SERIES, strict=False))
    ranks = sorted({row["ranks"] for row in rows})
    with style():
        figure = new_figure(11, 8.4)
        figure.subplots_adjust(left=0.06, right=0.97, bottom=0.06, top=0.86, hspace=0.28, wspace=0.13)
        title = "One rank's program on PyTorch's fake process group, on more and more ranks"
        figure.text(0.02, 0.985, title, fontsize=13, fontweight="bold", va="top")
        colors = [Line2D([], [], color=color, lw=3, label=layout) for layout, color in layouts.items()]
        figure.legend(handles=colors, ncols=len(colors), loc="upper left", bbox_to_anchor=(0.01, 0.957))
        for axis, (title, columns, unit) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            for column, dash in zip(columns, ("-o", "--s", ":^"), strict=False):
                for layout, color in layouts.items():
                    own = [row for row in rows if row["layout"] == layout]
                    x = [row["ranks"] for row in own]
                    y = [row[column] / unit for row in own]
                    axis.plot(x, y, dash, ms=5, color=color, clip_on=False, zorder=3)
                # For the legend, which names dashes: the figure's own names colours.
                axis.plot([], [], dash, ms=5, color=LIGHT.ink, label=column.removesuffix(" bytes"))
            axis.set(title=title, xscale="log", xlabel="ranks", ylim=(0, None))
            axis.set_xticks(ranks, [f"{count:,}" for count in ranks])
            axis.minorticks_off()
            axis.legend()
        save(figure, file)


def table(rows: list[dict]) -> str:
    columns = "mesh s     MB  model s     MB   step s    row s  row 0 s  step KB   row KB row 0"
    lines = [f"{'layout':<14}{'ranks':>8}  {columns}"]
    (_, seconds, _), (_, sizes, _), *_ = PANELS
    for row in rows:
        line = f"{row['layout']:<14}{row['ranks']:>8,}"
        line += f"{row['mesh']:>8.2f}{row['mesh bytes'] / 1e6:>7.1f}"
        line += f"{row['model']:>9.2f}{row['model bytes'] / 1e6:>7.1f}"
        line += "".join(f"{row[key]:>9.3f}" for key in seconds)
        line += "".join(f"{row[key] / 1e3:>9.0f}" for key in sizes)
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=DEFAULT)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    get_logger().setLevel("ERROR")
    # Processes are forked from here, and threads would not be there in them.
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    rows = []
    for layout in args.layout:
        for ranks in args.ranks:
            rows.append(in_a_process(layout, ranks))
            print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.png:
        draw(rows, args.png)
    grown = 0.0
    for layout in args.layout:
        own = [row["step bytes"] for row in rows if row["layout"] == layout]
        grown = max(grown, own[-1] / own[0])
    print(f"a step's Python memory at {args.ranks[-1]:,} ranks is at most {grown:.3f} of that at {args.ranks[0]:,}")
    return int(grown > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
