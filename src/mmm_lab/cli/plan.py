"""``mmm plan --model NAME …``: which layouts fit, what they need, send and take, before a job is queued."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm_lab.cli.parser import STANDARD_OUTPUT, Parser, count
from mmm_lab.cli.sizes import parse_bytes, parse_tokens
from mmm_lab.cli.written import write_json, write_text
from mmm_lab.planner import machine_text
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine, read

if TYPE_CHECKING:
    from mmm_lab.planner.candidate import Candidate
    from mmm_lab.planner.search import Search

EPILOG = """\
docs/plan.md says what is assumed.

examples:
  mmm plan --model llama-8b --site aurora --nhosts 128 --seq-length 8192 --global-batch 1024
  mmm plan --model llama-8b --nhosts 128 --gpus-per-host 12 --gpu-memory 64GiB --global-batch 1024
  mmm plan --model llama-8b --site polaris --nhosts 16 --global-batch 64 --exactly --tp 4 --pp 2
exit codes: 0 some layouts fit, 2 none fits, or wrong arguments
"""
# Flags of the model's sizes. `planner.named_model` takes them by these names.
SIZES = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "n_experts", "top_k", "expert_dim")
# Flags that fix an axis, or a field of `Techniques`, of the same name.
FIXED_COUNTS = ("pp", "tp", "cp", "ep", "dp_replicate", "microbatches", "stages_per_rank", "loss_chunks")
FIXED_NAMES = ("parallel", "activation_checkpointing", "schedule", "cp_style")
# Two of the names are called as in a trainer, and not as the field.
FIELDS = {"parallel": "data_parallel", "activation_checkpointing": "checkpointing"}


def _flag(name: str) -> str:
    """Returns the flag whose value argparse keeps under `name`."""
    return f"--{name.replace('_', '-')}"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="mmm plan",
        description="Say which layouts fit a machine, what they need, send and take, before a job is queued.",
        epilog=EPILOG,
        # --exact, which is a flag of the trainers, is not short for --exactly.
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME",
        help="a preset of mmm.trainer.lm, vit, vit-base …, the config.json of a Llama",
    )
    either = made.add_mutually_exclusive_group()
    either.add_argument("--site", metavar="NAME", help="a known machine; mmm machine lists them")
    either.add_argument("--machine", metavar="FILE", help="a machine of your own, such as mmm machine --measure writes")
    add("--nhosts", metavar="N", type=count, help="number of hosts")
    add("--gpus-per-host", metavar="N", type=count, help="devices of a host, with a rank each")
    add("--gpu-memory", metavar="SIZE", type=parse_bytes, help="memory of a device, such as 64GiB")
    add(
        "--seq-length",
        metavar="N",
        type=count,
        default=2048,
        help="tokens of a sample (default: 2048)",
    )
    add("--global-batch", metavar="N", type=count, help="samples of a step (default: one for each device)")
    add("--dtype", choices=("bf16", "fp32", "fp64"), help="default: bf16, on a CPU fp32")
    add(
        "--optimizer",
        choices=("adamw", "sgd", "muon"),
        default="adamw",
        help="default: adamw",
    )
    sizes = made.add_argument_group("sizes that differ from the preset's")
    for name in SIZES:
        sizes.add_argument(_flag(name), metavar="N", type=int)
    fixed = made.add_argument_group("only layouts with")
    for name in FIXED_COUNTS:
        fixed.add_argument(_flag(name), metavar="N", type=count)
    for name in FIXED_NAMES:
        fixed.add_argument(_flag(name), metavar="NAME")
    fixed.add_argument(
        "--exactly", action="store_true", help="one layout: axes that are not named are 1, techniques as usual"
    )
    run = made.add_argument_group("the run as a whole")
    run.add_argument(
        "--tokens",
        metavar="N",
        type=parse_tokens,
        help="days, node-hours and checkpoints of so many, such as 300M or 20B",
    )
    shown = made.add_argument_group("what is shown")
    shown.add_argument(
        "--top",
        metavar="N",
        type=count,
        default=5,
        help="so many of the best (default: 5)",
    )
    shown.add_argument(
        "--explain", action="store_true", help="every assumption with its source, and the best in detail"
    )
    shown.add_argument("--script", metavar="FILE", type=Path, help="write a job script that runs the best to FILE")
    made.add_json("all layouts that fit, best first,")
    return made


def machine_of(args: argparse.Namespace) -> Machine:
    """Returns the machine that the flags describe. Raises ConfigError."""
    if args.machine is not None:
        machine = read(args.machine)
    elif args.site is not None:
        machine = find.named(os.environ, args.site)
        # 0: its file does not say how many there are.
        if args.nhosts is not None and 0 < machine.hosts < args.nhosts:
            raise ConfigError(f"--nhosts {args.nhosts:,}: {machine.name} has {machine.hosts:,}")
    elif args.nhosts is not None:
        machine = find.named(os.environ, "generic")
    else:
        names = "|".join(find.load(os.environ))
        raise ConfigError(f"which machine? give --site {names}, --machine FILE, or --nhosts N")
    # A file of the user's own says how many hosts are meant; ours say how many a centre has.
    is_ours = Path(machine.file).parent == find.BUILT_IN
    if args.nhosts is None and machine.hosts > 1 and is_ours:
        raise ConfigError(f"--nhosts is missing: how many of the {machine.hosts:,} of {machine.name}?")
    # What is None stays as it is.
    changes = {"hosts": args.nhosts, "ranks_per_host": args.gpus_per_host, "gpu_memory": args.gpu_memory}
    return machine.changed(changes)


def fixed_by(args: argparse.Namespace) -> dict[str, int | str]:
    """Returns the values that a layout has to have, by axis or field of `Techniques`. Raises ConfigError."""
    fixed: dict[str, int | str] = {}
    for name in (*FIXED_COUNTS, *FIXED_NAMES):
        value = getattr(args, name)
        if value is not None:
            fixed[FIELDS.get(name, name)] = value
    # They are the same, and the search knows the second.
    if args.parallel == "zero3":
        fixed["data_parallel"] = "fsdp"
    return fixed


def main(argv: list[str]) -> int:
    """Search, and say what was found. Returns 0. Raises UserError for what is wrong, or where nothing fits."""
    args = parser().parse_args(argv)
    machine = machine_of(args)
    global_batch = args.global_batch
    # The smallest that gives each device a sample.
    if global_batch is None:
        global_batch = machine.ranks

    from mmm_lab.planner import report, script
    from mmm_lab.planner.asked import exactly
    from mmm_lab.planner.campaign import lines_of
    from mmm_lab.planner.named_model import read_model
    from mmm_lab.planner.search import Search  # imports torch

    # None where the flag was not given: the size is the preset's.
    sizes = {name: getattr(args, name) for name in SIZES}
    spec = read_model(args.model, sizes, args.seq_length)
    # A vision model's samples are images.
    if args.tokens and not spec.seq_length:
        raise ConfigError(f"--tokens {args.tokens:g}: {args.model} has no sequence of tokens")
    dtype = args.dtype or "bf16"
    # A CPU computes bf16 slowly.
    if args.dtype is None and machine.device == "cpu":
        dtype = "fp32"
    fixed = fixed_by(args)
    if args.exactly:
        fixed = exactly(fixed)
    search = Search(spec, machine, global_batch, dtype, args.optimizer, fixed)
    result = search.run()
    kinds = report.why_each(result, machine.budget)
    # Written also if nothing fits: the list then has only the kinds that do not fit, each with its reason.
    write_json(args.json, report.as_json(search, result, kinds))
    lines: list[str] = []
    if not result.best:
        # The tree's numbers say why nothing fits.
        lines += _tree_lines(search, True, args.tp)
    else:
        best = result.best[0]
        lines += report.text_of(search, result, kinds, args.top)
        lines += ["", *_tree_lines(search, args.explain, best.layout.tp)]
        if args.explain:
            lines += ["", f"the best in detail, {best.layout}", *report.details(search, best)]
            lines += ["", "assumed", *machine_text.assumed(machine)]
        launch = script.launch_line(best, spec, machine, search.global_batch, search.dtype)
        lines += ["", *_faults_of(best), *script.trial(launch, spec)]
        if args.tokens:
            lines += ["", *lines_of(search, best, args.tokens)]
        if args.script is not None:
            write_text(args.script, script.trial_script(launch, spec, machine), "--script")
            lines.append(f"job script: {args.script}")
    if args.json != STANDARD_OUTPUT:
        print("\n".join(lines))
    if not result.best:
        raise ConfigError(report.missing(search, result))
    return 0


def _faults_of(best: Candidate) -> list[str]:
    """What the line of launch asks of a PyTorch that the one here cannot do. That of the machine may be another."""
    from mmm.parallel.pp.schedules import choices_of
    from mmm.torch_private.faults import met

    pp = best.layout.pp
    if pp == 1:
        return []
    techniques = best.techniques
    choices = choices_of(techniques.schedule, pp, best.trial.microbatches, techniques.loss_chunks)
    return [f"# the PyTorch here cannot do {fault}" for fault in met(choices)]


def _tree_lines(search: Search, explain: bool, tp: int | None) -> list[str]:
    """Returns what the decision tree says, and a note where tensor parallelism spans hosts.

    Args:
        explain: show the questions with their answers, and the numbers that they are about.
        tp: of the best layout, or the one that was asked for.
    """
    from mmm_lab.planner import tree

    facts, facts_lines = tree.facts_of(search.spec, search.machine, search.memory)
    decision = tree.decide(facts)
    lines = [f"the decision tree says: {decision.answer}"]
    if explain:
        lines += [f"  {question:<46} {reply}" for question, reply in decision.path]
        lines += [f"  {line}" for line in facts_lines]
    if tp:
        warning = tree.across_hosts(tp, search.machine)
        if warning:
            lines.append(f"note: {warning}")
    return lines
