"""Traffic: the bytes that each way of training sends in a step, counted, beside the formula.

    launch python3 -m mmm.examples.traffic

The same small Transformer takes three steps on each layout that the ranks allow; in the third, all that is handed to a
process group is counted where it is handed over. Of the rank that sends most, the table has

    counted    by the algorithms that nobody undercuts: a ring's all-reduce, all-gather, …
    formula    what the layout has to send, from the model's shapes alone
    gloo       by the algorithms of gloo, which moves CPU tensors: its reduce-scatter is a whole all-reduce
    sockets    what the kernel says that the rank's sockets have sent in that step

A layout whose counted bytes are more than 5 % off the formula on any rank and axis ends the run with exit code 1.
Formulas and sources: docs/communication.md, `mmm.parallel.traffic_theory`, `mmm.parallel.collective_bytes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch, Tokens
from mmm.errors import LayoutError
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, apply, batch_sizes, build_mesh, cross_entropy, materialize
from mmm.parallel.context import cut_batch
from mmm.parallel.pipeline import Pipeline, check_pipeline, stages_of
from mmm.parallel.plans.transformer import check_transformer, transformer_plan
from mmm.parallel.stages import cut, parts_of, take_stage
from mmm.parallel.traffic import count_traffic
from mmm.parallel.traffic_theory import expected_traffic
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.runtime.sockets import sent_since, socket_bytes
from mmm.trainer.options import RunOptions, TextOptions, TransformerOptions, parse
from mmm.trainer.run import Run, start_run

LIMIT = 0.05


@dataclass(frozen=True, kw_only=True)
class Config(TransformerOptions, TextOptions, RunOptions):
    """Bytes a step of every layout. Three steps each; flags of training, such as --lr, do nothing."""

    preset: Literal["debug", "small", "medium"] = "debug"
    n_layers: int | None = 4
    n_kv_heads: int | None = 4
    seq_length: int = 64
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "fp32"
    microbatches: int = 4
    """Of the pipelines."""


class Case(NamedTuple):
    """A layout, and what is on it. schedule: of a pipeline; cp_style: where the sequence is cut."""

    name: str
    layout: Layout
    technique: str = "fsdp"
    cp_style: str = "ring"
    schedule: str = ""


class Step(NamedTuple):
    """One rank's step: bytes by axis, counted and expected; by gloo; by the sockets (0 where gloo moves nothing)."""

    counted: dict[str, int]
    formula: dict[str, float]
    gloo: int
    sockets: int


def cases(ranks: int) -> list[Case]:
    """Those that the number of ranks allows."""
    whole, half = Layout(), ranks // 2
    found = [Case(name, whole, name) for name in ("ddp", "zero1", "zero2", "fsdp")]
    if ranks % 2 == 0 and half > 1:
        found.append(Case("hsdp", Layout(dp_replicate=2), "hsdp"))
    found.append(Case("tp, sequence cut", Layout(tp=ranks)))
    found += [Case(f"pp, {name}", Layout(pp=ranks), schedule=name) for name in ("GPipe", "1F1B")]
    found += [Case(f"cp, {style}", Layout(cp=ranks), cp_style=style) for style in ("ring", "ulysses")]
    if ranks % 2 == 0 and half > 1:
        found.append(Case("fsdp × tp", Layout(tp=2)))
        found.append(Case("pp × tp", Layout(pp=2, tp=half), schedule="1F1B"))
    return [case._replace(layout=case.layout.fit(ranks)) for case in found]


def problem(case: Case, sizes: TransformerConfig, config: Config, batch: int) -> str:
    """Why a model of these sizes cannot be laid out so; empty where it can."""
    try:
        check_transformer(sizes, case.layout, config.seq_length, case.cp_style)
        if case.schedule:
            with torch.device("meta"):
                parts = len(parts_of(Transformer(sizes), transformer_plan()))
            check_pipeline(case.layout, case.schedule, config.microbatches, batch, parts)
    except LayoutError as error:
        return str(error)
    return ""


def make_step(
    run: Run, mesh: DeviceMesh, case: Case, sizes: TransformerConfig, part: Batch, positions: torch.Tensor
) -> tuple[Callable[[], object], dict[str, float]]:
    """A function that makes a step of training, and what the formula says of it."""
    with torch.device("meta"):
        model: nn.Module = Transformer(sizes)
    options, layout, plan, stages = run.options, case.layout, transformer_plan(), 1
    assert isinstance(options, Config)
    held: Mapping[int, nn.Module] = {0: model}
    if case.schedule:
        parts = parts_of(model, plan)
        cuts = cut([1] * len(parts), layout.pp)
        stages = len(cuts)
        numbers = stages_of(layout.coordinates(run.rank.rank)["pp"], layout.pp, case.schedule, 1)
        held = {number: take_stage(model, parts, cuts[number]) for number in numbers}
    formula = expected_traffic(
        held, plan, layout, batch=len(part.inputs), seq_length=options.seq_length, precision=run.precision,
        data_parallel=case.technique, cp_style=case.cp_style, stages=stages,
        microbatches=options.microbatches if case.schedule else 1,
    )  # fmt: skip
    made = {}
    for number, stage in held.items():
        made[number] = apply(stage, mesh, plan, run.precision, data_parallel=case.technique, cp_style=case.cp_style)
        materialize(made[number], run.device, options.seed)
    optimizer = torch.optim.SGD([p for stage in made.values() for p in stage.parameters()], lr=1e-3)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, targets, part.count)

    if case.schedule:
        pipeline = Pipeline(made, stages, mesh, schedule=case.schedule, microbatches=options.microbatches,
                            loss=loss_of, device=run.device)  # fmt: skip

    def step() -> None:
        with loss_parallel():
            if case.schedule:
                pipeline.step(part.inputs, part.targets, positions=positions)
            else:
                loss_of(made[0](part.inputs, positions), part.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, formula


def measure(run: Run, case: Case, sizes: TransformerConfig, tokens: Tokens, global_batch: int) -> list[Step]:
    """The third step on a layout, by rank. A collective."""
    layout, options = case.layout, run.options
    mesh = build_mesh(layout, run.device.type, options.timeout)
    each = global_batch // layout.dp
    whole = tokens.batch(0, global_batch, layout.dp_coordinate(run.rank.rank) * each, each).to(run.device)
    part, positions = cut_batch(whole, layout.coordinates(run.rank.rank)["cp"], layout.cp)
    step, formula = make_step(run, mesh, case, sizes, part, positions)
    for _ in range(2):  # they send more: a pipeline shapes, DDP how it has packed its gradients
        step()
    by_gloo = run.device.type == "cpu" and sys.platform == "linux"
    dist.barrier()
    before = socket_bytes() if by_gloo else {}
    with count_traffic(mesh) as traffic:
        step()
    with count_traffic() as end:
        dist.barrier()  # nothing is on its way after it; it has sent something itself
    sockets = sent_since(before) - end.wire if by_gloo else 0
    everyone: list[Step] = [None] * run.rank.world_size  # type: ignore[list-item]
    dist.all_gather_object(everyone, Step(traffic.by_axis, formula, traffic.wire, sockets))
    run.log.info("%s, layout %s: rank 0\n%s", case.name, layout, traffic.table())
    return everyone


def apart(step: Step) -> float:
    """The largest relative difference of counted and formula over the axes."""
    axes = {axis for side in (step.counted, step.formula) for axis, count in side.items() if count}
    pairs = [(step.counted.get(axis, 0), step.formula.get(axis, 0.0)) for axis in axes]
    return max((abs(counted / formula - 1) if formula else float("inf") for counted, formula in pairs), default=0.0)


def table(found: Mapping[Case, list[Step]]) -> str:
    """A line a layout and axis, of the rank that sends most; gloo and sockets for all axes, on the first line."""
    lines = [f"{'':18}{'layout':<24}{'axis':<13}{'counted':>12}{'formula':>12}{'differ':>8}{'gloo':>12}{'sockets':>12}"]
    for case, by_rank in found.items():
        most = max(by_rank, key=lambda step: sum(step.counted.values()))
        head = f"{case.name:18}{case.layout!s:<24}"
        wire = f"{most.gloo:12,}{most.sockets:12,}"
        for axis, formula in most.formula.items():
            counted = most.counted.get(axis, 0)
            lines.append(f"{head}{axis:<13}{counted:12,}{formula:12,.0f}{counted / formula - 1:8.2%}{wire}")
            head, wire = " " * 42, ""
    return "\n".join(lines)


def train(config: Config) -> bool:
    """Every layout, and the table. Whether all are within 5 % of the formula."""
    config.check()
    ranks = whoami().world_size
    sizes = config.model_config(config.default_vocab())
    if ranks == 1:
        raise LayoutError("1 rank: there is nobody to send to; start with `launch -n 4 --device cpu python3 -m "
                          "mmm.examples.traffic`")  # fmt: skip
    _, global_batch = batch_sizes(config.batch_size, config.global_batch_size, ranks, default=4)
    check_transformer(sizes, Layout().fit(ranks), config.seq_length)
    tokens, _, about_data = config.load(sizes.vocab_size, config.seed)
    asked = cases(ranks)
    why_not = {case: problem(case, sizes, config, global_batch // case.layout.dp) for case in asked}
    with start_run("traffic", config, Layout().fit(ranks)) as run:
        run.describe(model=sizes, data=about_data, global_batch_size=global_batch)
        for case in asked:
            if why_not[case]:
                run.note(f"{case.name} left out: {why_not[case]}")
        found = {case: measure(run, case, sizes, tokens, global_batch) for case in asked if not why_not[case]}
        worst = {case: max(map(apart, by_rank)) for case, by_rank in found.items()}
        run.log.info("bytes of a step, on the rank that sends most; %d samples of %d tokens in all\n%s", global_batch,
                     config.seq_length, table(found))  # fmt: skip
        run.describe(traffic={case.name: [step._asdict() for step in by_rank] for case, by_rank in found.items()})
        wrong = [case.name for case in found if worst[case] > LIMIT]
        run.log.info("counted and formula differ by %.2f %% at most, of any layout, axis and rank (allowed: %.0f %%)%s",
                     100 * max(worst.values()), 100 * LIMIT, f": {', '.join(wrong)}" if wrong else "")  # fmt: skip
    return not wrong


def main() -> None:
    if not train(parse(Config, __doc__)):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
