"""``mmm plan --model NAME …``: which layouts fit, what they need, send and take, before a job is queued."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm_lab.campaign.command import time_to_save
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.sizes import job_time, parse_bytes, parse_tokens
from mmm_lab.cli.written import write_json, write_text
from mmm_lab.planner import machine_text
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine, read

if TYPE_CHECKING:
    from mmm_lab.planner.candidate import Candidate, Found
    from mmm_lab.planner.search import Search

EPILOG = """\
examples:
  mmm plan --model llama-8b --site aurora --hosts 128 --seq_length 8192 --global_batch 1024
  mmm plan --model llama-8b --hosts 128 --gpus-per-host 12 --gpu-memory 64GiB --seq_length 8192 --global_batch 1024
  mmm plan --model config.json --site perlmutter --hosts 4 --global_batch 64 --explain --script job.sh
  mmm plan --model llama-8b --site perlmutter --hosts 64 --global_batch 512 --tokens 20B --walltime 6h
  mmm machine --measure here.json; mmm plan --model small --machine here.json
  mmm plan --exactly --model llama-8b --site polaris --hosts 16 --tp 4 --pp 2 --global_batch 64
docs/plan.md says what is assumed.
"""
SIZES = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "n_experts", "top_k", "expert_dim")
FIXED = {  # flag → axis, or field of Techniques
    "pp": "pp",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "dp_replicate": "dp_replicate",
    "microbatches": "microbatches",
    "parallel": "data_parallel",
    "activation_checkpointing": "checkpointing",
    "schedule": "schedule",
    "stages_per_rank": "stages_per_rank",
    "cp_style": "cp_style",
    "loss_chunks": "loss_chunks",
}


def _both(name: str) -> list[str]:
    return sorted({f"--{name}", f"--{name.replace('_', '-')}"})


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="mmm plan", description=__doc__, epilog=EPILOG)
    add = made.add_argument
    add("--model", metavar="NAME", help="a preset of mmm.trainer.lm, vit, vit-base …, the config.json of a Llama")
    add("--site", metavar="NAME", help="a known machine; mmm machine lists them")
    add("--machine", metavar="FILE", help="a machine of one's own, such as mmm machine --measure writes")
    add("--hosts", metavar="N", type=int)
    add(*_both("gpus_per_host"), metavar="N", type=int, help="devices, with a rank each")
    add(*_both("gpu_memory"), metavar="SIZE", help="of a device, such as 64GiB")
    add(*_both("seq_length"), metavar="N", type=int, default=2048, help="tokens of a sample (default: 2048)")
    add(*_both("global_batch"), *_both("global_batch_size"), metavar="N", type=int, help="samples of a step")
    add("--dtype", choices=("bf16", "fp32", "fp64"), help="default: bf16, on a CPU fp32")
    add("--optimizer", choices=("adamw", "sgd", "muon", "lars", "lamb"), default="adamw")
    sizes = made.add_argument_group("sizes that differ from the preset's")
    for name in SIZES:
        sizes.add_argument(*_both(name), metavar="N", type=int)
    sizes.add_argument(*_both("tie_word_embeddings"), action="store_true")
    fixed = made.add_argument_group("only layouts with")
    for name in FIXED:
        number = name not in ("parallel", "activation_checkpointing", "schedule", "cp_style")
        fixed.add_argument(*_both(name), metavar="N" if number else "NAME", type=int if number else str)
    one = "one layout: axes that are not named are 1, techniques as usual"
    fixed.add_argument("--exactly", action="store_true", help=one)
    run = made.add_argument_group("the run as a whole")
    run.add_argument("--tokens", metavar="N", help="days, node-hours and checkpoints of so many, such as 300M or 20B")
    run.add_argument("-t", "--walltime", metavar="TIME", help="of a job, such as 6h or 6:00: how many jobs that makes")
    shown = made.add_argument_group("what is shown")
    shown.add_argument("--top", metavar="N", type=int, default=5, help="of the best (default: 5)")
    shown.add_argument(
        "--explain", action="store_true", help="every assumption with its source, and the best in detail"
    )
    shown.add_argument("--script", metavar="FILE", type=Path, help="write a job script that runs the best")
    shown.add_argument("--json", metavar="FILE", type=Path, help="write all that fit, best first")
    return made


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the flags describe. Raises ConfigError."""
    if args.site is not None and args.machine is not None:
        raise ConfigError("--site and --machine contradict each other: leave one out")
    for name in ("hosts", "gpus_per_host"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 10**6:
            raise ConfigError(f"--{name} {value}: it must be from 1 to 1,000,000")
    memory = None if args.gpu_memory is None else parse_bytes(args.gpu_memory, "--gpu_memory")
    if args.site is None and args.machine is None and args.hosts is None:
        names = "|".join(find.load(os.environ))
        raise ConfigError(f"which machine? give --site {names}, --machine FILE, or --hosts N")
    machine = read(args.machine) if args.machine is not None else find.named(os.environ, args.site or "generic")
    changed = machine.changed({"hosts": args.hosts, "ranks_per_host": args.gpus_per_host, "gpu_memory": memory})
    if args.site is not None and args.hosts is not None and 0 < machine.hosts < args.hosts:
        raise ConfigError(f"--hosts {args.hosts:,}: {machine.name} has {machine.hosts:,}")
    if args.hosts is None and machine.hosts > 1 and Path(machine.file).parent == find.BUILT_IN:
        raise ConfigError(f"--hosts is missing: how many of the {machine.hosts:,} of {machine.name}?")
    return changed


def run_of(args: argparse.Namespace) -> tuple[float, float | None]:
    """The tokens of the run, 0 where none are named, and the seconds of a job. Raises ConfigError."""
    tokens = 0.0 if args.tokens is None else parse_tokens(args.tokens, "--tokens")
    if args.walltime is None:
        return tokens, None
    if not tokens:
        raise ConfigError(f"--walltime {args.walltime}: it is of a run's jobs; say how long that is: --tokens 20B")
    return tokens, job_time(args.walltime, "--walltime")


def fixed_by(args: argparse.Namespace) -> dict[str, int | str]:
    """Axis, or field of `Techniques`, → the value that it has to have. Raises ConfigError."""
    fixed = {field: getattr(args, name) for name, field in FIXED.items() if getattr(args, name) is not None}
    for name in ("microbatches", "stages_per_rank", "loss_chunks"):
        if fixed.get(name, 1) < 1:
            raise ConfigError(f"--{name} {fixed[name]}: it must be at least 1")
    if fixed.get("data_parallel") == "zero3":
        fixed["data_parallel"] = "fsdp"  # the same
    return fixed


def main(argv: list[str]) -> int:
    """Search, and say what was found. Returns 0. Raises UserError for what is wrong, or where nothing fits."""
    args = parser().parse_args(argv)
    if args.model is None:
        raise ConfigError("--model is missing: such as --model llama-8b")
    if args.top < 1:
        raise ConfigError(f"--top {args.top}: it must be at least 1")
    tokens, walltime = run_of(args)
    machine = machine_of(args)
    global_batch = machine.ranks if args.global_batch is None else args.global_batch
    if not 1 <= global_batch <= 10**7:
        raise ConfigError(f"--global_batch {global_batch}: it must be from 1 to 10,000,000 samples")
    if not 1 <= args.seq_length <= 10**8:
        raise ConfigError(f"--seq_length {args.seq_length}: it must be from 1 to 100,000,000 tokens")

    from mmm_lab.planner import report, script
    from mmm_lab.planner.asked import exactly
    from mmm_lab.planner.named_model import read_model
    from mmm_lab.planner.search import Search  # imports torch

    spec = read_model(
        args.model, {name: getattr(args, name) for name in SIZES}, args.seq_length, args.tie_word_embeddings
    )
    if tokens and not spec.seq_length:
        raise ConfigError(f"--tokens {args.tokens}: {args.model} has no sequence of tokens")
    dtype = args.dtype or ("fp32" if machine.device == "cpu" else "bf16")
    fixed = fixed_by(args)
    if args.exactly:
        fixed = exactly(fixed)
    search = Search(spec, machine, global_batch, dtype, args.optimizer, fixed)
    found = search.run()
    kinds = report.why_each(found, machine.budget)
    write_json(args.json, report.as_json(search, found, kinds))
    if not found.best:
        print("\n".join(_tree_lines(search, found, True, args.tp)))
        raise ConfigError(report.missing(search, found))
    lines = report.text_of(search, found, kinds, args.top)
    lines += ["", *_tree_lines(search, found, args.explain, found.best[0].layout.tp)]
    if args.explain:
        lines += ["", f"the best in detail, {found.best[0].layout}", *report.details(search, found.best[0])]
        lines += ["", "assumed", *machine_text.assumed(machine)]
    line = script.launch_line(found.best[0], spec, machine, search.global_batch, search.dtype)
    lines += ["", *script.trial(line, spec)]
    if tokens:
        lines += ["", *_run_lines(args, search, found.best[0], line, tokens, walltime)]
    if args.script is not None:
        write_text(args.script, script.trial_script(line, spec, machine), "--script")
        lines.append(f"job script: {args.script}")
    print("\n".join(lines))
    return 0


def _run_lines(
    args: argparse.Namespace, search: Search, best: Candidate, launch: str, tokens: float, walltime: float | None
) -> list[str]:
    """What the whole run takes, and the line that submits it."""
    from mmm_lab.planner import script
    from mmm_lab.planner.campaign import lines_of, steps_between_saves, steps_for
    from mmm_launch.machines.queues import not_taken, queue_for

    before_end = 0.0 if walltime is None else time_to_save(walltime)
    lines = lines_of(search, best, tokens, walltime, before_end)
    machine = search.machine
    if walltime is not None and machine.scheduler:
        project = f" --project {script.PROJECT}" if "{project}" in " ".join(machine.script) else ""
        data = f"--text {script.FOLDER} " if search.spec.program == "mmm.trainer.lm" else ""
        steps = steps_for(search, tokens)
        every = steps_between_saves(best, steps)
        saves = f"{data}--max_iters {steps} --checkpoint_every {every} --outdir runs/a"
        queue = queue_for(machine, machine.hosts, walltime)
        why_not = not_taken(machine, queue, machine.hosts, walltime)
        if why_not:
            return [*lines, why_not]
        other = f" --queue {queue}" if queue != machine.queue else ""
        where = f"--site {args.site} -N {machine.hosts} -t {args.walltime}{other}{project}"
        lines += ["", f"mmm submit {where} --until-done -- {launch} {saves}"] if args.site else []
    return lines


def _tree_lines(search: Search, found: Found, explain: bool, tp: int | None) -> list[str]:
    """What the decision tree says, and what it must not be read as: tp, of what was found or asked for, over hosts."""
    from mmm_lab.planner import tree

    facts, numbers = tree.facts_of(search.spec, search.machine, search.memory)
    decision = tree.decide(facts)
    beside = f"; {tree.beside_answer(decision, found.best)}" if found.best else ""
    lines = [f"the decision tree says: {decision.answer}{beside}"]
    if explain:
        lines += [f"  {question:<46} {answer}" for question, answer in decision.path]
        lines += [f"  {line}" for line in numbers]
    if tp and (warning := tree.across_hosts(tp, search.machine)):
        lines.append(f"note: {warning}")
    return lines
