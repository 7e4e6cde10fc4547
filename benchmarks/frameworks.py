"""Are the frameworks that people use right? Small programs of theirs, each proven by `mmm verify` on this host's CPU.

    python3 benchmarks/frameworks.py                          # all, some minutes; the first time it installs them
    python3 benchmarks/frameworks.py --only lightning torch   # some of them, with all that verify says
    python3 benchmarks/frameworks.py --table docs/frameworks.md     # with --only: other rows of the page stay

Each framework is installed by pip into a folder of its own, with the versions in benchmarks/frameworks/requirements.
A program runs with that folder and PyTorch's, and with no other package of this Python. A verdict "not the same" needs
a control, which differs from it only in what is wrong, and is "same".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "frameworks"
SOURCE = Path(__file__).parent.parent / "src"
CACHE = Path(os.environ.get("MMM_FRAMEWORKS", Path.home() / ".cache/mmm/frameworks"))
BEGIN = "<!-- frameworks: python3 benchmarks/frameworks.py --table docs/frameworks.md -->"
END = "<!-- end -->"
# Seconds that verify gives one device, and then the ranks.
TIMEOUT = "240"
SAME, NOT_SAME = "same", "not the same"
# Frameworks that have no wheel: name → environment variables for their build.
FROM_SOURCE = {"deepspeed": {"DS_BUILD_OPS": "0"}}


@dataclass(frozen=True)
class Case:
    """A program of a framework.

    Attributes:
        framework: its requirements file, and the package whose version the table shows.
        program: what it does, for the table.
        mesh: the ranks.
        parallelize: ``module:name`` in the folder of programs.
        settings: the other flags of verify.
        expected: the verdict. Anything else ends the benchmark with an error.
        control: `program` of the case that shows that nothing else is wrong, where the verdict is "not the same".
        report: where the mistake is reported, or that it is planted.
    """

    framework: str
    program: str
    mesh: str
    parallelize: str
    settings: str = ""
    expected: str = SAME
    control: str = ""
    report: str = ""


SMALL = "--model small:make_model --batch small:make_batch --optimizer small:make_optimizer"
ACCELERATE = f"{SMALL} --step accelerate_:step"
LIGHTNING = f"{SMALL} --step lightning_:step"
LLAMA = "--model transformers_:make_llama --batch transformers_:make_batch"
TIED = "--model transformers_:make_tied --batch transformers_:make_batch"
UNEQUAL = "--model transformers_:make_llama --batch transformers_:make_unequal"
QWEN3 = "--model transformers_:make_qwen3 --batch transformers_:make_batch"
GEMMA3 = "--model transformers_:make_gemma3 --batch transformers_:make_batch"
GPT_OSS = "--model transformers_:make_gpt_oss --batch transformers_:make_batch"
MOE = "--model transformers_:make_moe --batch transformers_:make_batch"
TRAINER = "--step transformers_:trainer_step --optimizer small:make_optimizer"
HALVES = "--step transformers_:step_by_halves"
TRAINER_HALVES = "--step transformers_:trainer_step_by_halves --optimizer small:make_optimizer"
SMOOTHING = "--step transformers_:smooth_step --optimizer small:make_optimizer"
MEGATRON = f"{SMALL} --adapter megatron"
# Its cross-entropy computes in float32, whatever the logits are.
MEGATRON_LOSS = f"{MEGATRON} --dtype float32 --step"
MEGATRON_HEAD = (
    "--model megatron_:make_head --batch megatron_:make_head_batch --adapter megatron --dtype float32 --step"
)
# Its ZeRO has float32 weights, and its all-reduce refuses float64.
DEEPSPEED = f"{SMALL} --adapter deepspeed --dtype float32 --step"
# Its cross-entropy computes in float32, whatever the logits are.
TORCHTITAN = "--model torchtitan_:make_model --batch torchtitan_:make_batch --dtype float32 --step"
ANEMOI = "--model anemoi_:make_model --batch anemoi_:make_batch --optimizer small:make_optimizer --step anemoi_:step"
PLANTED = "planted here"

CASES = [
    Case("torch", "FSDP1, flat parameters", "dp2", "pytorch:flat", SMALL),
    Case("torch", "FSDP1, `use_orig_params`", "dp2", "pytorch:original_parameters", SMALL),
    Case("torch", "FSDP1, `SHARD_GRAD_OP` (ZeRO 2)", "dp2", "pytorch:grad_op", SMALL),
    Case("torch", "DDP, `ZeroRedundancyOptimizer` (ZeRO 1)", "dp2", "pytorch:ddp_zero1", SMALL),
    Case("torch", "FSDP1 that ignores the head", "dp2", "pytorch:ignored_head", SMALL, NOT_SAME,
         "FSDP1, `use_orig_params`", PLANTED),
    Case("torch", "FSDP1, clipping, float32", "dp2", "pytorch:original_parameters",
         f"{SMALL} --step pytorch:clipping --dtype float32"),
    Case("torch", "FSDP2 over one rank, `set_gradient_divide_factor(2)`, float32", "dp1", "pytorch:one_rank_divided",
         f"{SMALL} --step pytorch:doubled --dtype float32"),
    Case("torch", "FSDP2 over one rank, `set_gradient_divide_factor(2)`, float64", "dp1", "pytorch:one_rank_divided",
         f"{SMALL} --step pytorch:doubled", NOT_SAME,
         "FSDP2 over one rank, `set_gradient_divide_factor(2)`, float32", "[none found](#fsdp2-over-one-rank)"),
    Case("accelerate", "DDP, clipping", "dp2", "accelerate_:ddp", ACCELERATE),
    Case("accelerate", "FSDP2, clipping", "dp2", "accelerate_:fsdp2", ACCELERATE),
    Case("accelerate", "the optimizer is prepared, the model is not", "dp2", "accelerate_:only_the_optimizer",
         ACCELERATE, NOT_SAME, "DDP, clipping", PLANTED),
    Case("lightning", "Fabric, `DDPStrategy`, clipping", "dp2", "lightning_:ddp", LIGHTNING),
    Case("lightning", "Fabric, `ModelParallelStrategy`: FSDP2, clipping", "dp2", "lightning_:model_parallel",
         LIGHTNING),
    Case("lightning", "Fabric, `ModelParallelStrategy`: tensor parallel", "tp2", "lightning_:model_parallel",
         f"{SMALL} --step lightning_:step_without_clipping"),
    Case("lightning", "Fabric, `ModelParallelStrategy`: both", "dp2,tp2", "lightning_:model_parallel",
         f"{SMALL} --step lightning_:step_without_clipping"),
    Case("lightning", "Fabric, `DDPStrategy`, `no_backward_sync` on the last micro-batch", "dp2", "lightning_:ddp",
         f"{SMALL} --step lightning_:forgotten_sync", NOT_SAME, "Fabric, `DDPStrategy`, clipping", PLANTED),
    Case("transformers", "Llama, `tp_plan`", "tp2", "transformers_:tp", LLAMA),
    Case("transformers", "Llama, `fsdp_plan`", "dp2", "transformers_:fsdp", LLAMA),
    Case("transformers", "Llama, both", "dp2,tp2", "transformers_:fsdp_tp", LLAMA),
    Case("transformers", "Llama with tied embeddings, `tp_plan`", "tp2", "transformers_:tp", TIED),
    Case("transformers", "Llama with tied embeddings, `fsdp_plan`", "dp2", "transformers_:fsdp", TIED),
    Case("transformers", "Qwen3, `tp_plan`", "tp2", "transformers_:tp", QWEN3),
    Case("transformers", "Qwen3, `tp_plan` that replicates `q_norm` without an all-reduce", "tp2",
         "transformers_:norm_without_sum", QWEN3, NOT_SAME, "Qwen3, `tp_plan`", PLANTED),
    Case("transformers", "Gemma 3, `tp_plan`, float32", "tp2", "transformers_:tp", f"{GEMMA3} --dtype float32"),
    Case("transformers", "GPT-OSS, `tp_plan`", "tp2", "transformers_:tp", GPT_OSS),
    Case("transformers", "Qwen3-MoE, `tp_plan`", "tp2", "transformers_:tp", MOE),
    Case("transformers", "Qwen3-MoE, `fsdp_plan`", "dp2", "transformers_:fsdp", f"{MOE} {HALVES}"),
    Case("transformers", "Qwen3-MoE, `fsdp_plan` and `ep_plan`, float32", "dp2", "transformers_:fsdp_ep",
         f"{MOE} {HALVES} --dtype float32"),
    Case("transformers", "Qwen3-MoE, `fsdp_plan` and `ep_plan`, float64", "dp2", "transformers_:fsdp_ep",
         f"{MOE} {HALVES}", NOT_SAME, "Qwen3-MoE, `fsdp_plan` and `ep_plan`, float32",
         "[PyTorch's](#fsdp2-over-one-rank)"),
    Case("transformers", "Llama, `Trainer` under DDP", "dp2", "transformers_:trainer", f"{LLAMA} {TRAINER}"),
    Case("transformers", "Llama, `Trainer` under DDP, ranks with other numbers of labels", "dp2",
         "transformers_:trainer", f"{UNEQUAL} {TRAINER}"),
    Case("transformers", "Llama, `Trainer` under DDP, the same with label smoothing", "dp2",
         "transformers_:trainer_with_smoothing", f"{UNEQUAL} {SMOOTHING}"),
    Case("transformers", "Qwen3-MoE, `Trainer` under DDP", "dp2", "transformers_:trainer", f"{MOE} {TRAINER_HALVES}",
         NOT_SAME, "Qwen3-MoE, `Trainer` under DDP, `average_tokens_across_devices=False`",
         "[transformers#48690](https://github.com/huggingface/transformers/issues/48690)"),
    Case("transformers", "Qwen3-MoE, `Trainer` under DDP, `average_tokens_across_devices=False`", "dp2",
         "transformers_:trainer_with_local_counts", f"{MOE} {TRAINER_HALVES}"),
    Case("megatron-core", "its DDP, `overlap_grad_reduce`", "dp2", "megatron_:ddp_overlapped",
         f"{MEGATRON} --step megatron_:overlapped_step"),
    Case("megatron-core", "tensor-parallel layers", "tp2", "megatron_:layers_gathered", MEGATRON),
    Case("megatron-core", "tensor-parallel layers and cross-entropy, its DDP, float32", "dp2,tp2", "megatron_:ddp",
         f"{MEGATRON_LOSS} megatron_:ddp_step"),
    Case("megatron-core", "the same with sequence parallelism, float32", "dp2,tp2", "megatron_:sequence_parallel",
         f"{MEGATRON_LOSS} megatron_:sequence_parallel_step"),
    Case("megatron-core", "the same, norms without the mark `sequence_parallel`, float32", "dp2,tp2",
         "megatron_:sequence_parallel_without_marks", f"{MEGATRON_LOSS} megatron_:sequence_parallel_step", NOT_SAME,
         "the same with sequence parallelism, float32", PLANTED),
    Case("megatron-core", "a matrix and the cross-entropy, float32", "tp2", "megatron_:head",
         f"{MEGATRON_HEAD} megatron_:head_step"),
    Case("megatron-core", "a matrix and the cross-entropy with label smoothing, float32", "tp2", "megatron_:head",
         f"{MEGATRON_HEAD} megatron_:smooth_head_step", NOT_SAME, "a matrix and the cross-entropy, float32",
         "[Megatron-LM#7452](https://github.com/NVIDIA/Megatron-LM/issues/7452), finding 1"),
    Case("deepspeed", "data parallel (ZeRO 0), float32", "dp2", "deepspeed_:ddp", f"{DEEPSPEED} deepspeed_:step"),
    Case("deepspeed", "ZeRO 1, float32", "dp2", "deepspeed_:zero1", f"{DEEPSPEED} deepspeed_:step"),
    Case("deepspeed", "ZeRO 2, float32", "dp2", "deepspeed_:zero2", f"{DEEPSPEED} deepspeed_:step"),
    Case("deepspeed", "ZeRO 3, float32", "dp2", "deepspeed_:zero3", f"{DEEPSPEED} deepspeed_:step"),
    Case("deepspeed", "ZeRO 1, `set_gradient_accumulation_boundary(False)` on the last micro-batch, float32", "dp2",
         "deepspeed_:zero1", f"{DEEPSPEED} deepspeed_:forgotten_boundary", NOT_SAME, "ZeRO 1, float32", PLANTED),
    Case("deepspeed", "AutoTP, float32", "tp2", "deepspeed_:auto_tp", f"{DEEPSPEED} deepspeed_:step"),
    Case("deepspeed", "AutoTP and ZeRO 1, float32", "dp2,tp2", "deepspeed_:auto_tp_zero1",
         f"{DEEPSPEED} deepspeed_:step"),
    Case("torchtitan", "Llama 3, `parallelize_llama`: FSDP2, float32", "dp2", "torchtitan_:parallelize",
         f"{TORCHTITAN} torchtitan_:step"),
    Case("torchtitan", "Llama 3, `parallelize_llama`: FSDP2, each rank's loss over its own tokens, float32", "dp2",
         "torchtitan_:parallelize", f"{TORCHTITAN} torchtitan_:local_tokens", NOT_SAME,
         "Llama 3, `parallelize_llama`: FSDP2, float32", PLANTED),
    Case("torchtitan", "Llama 3, `parallelize_llama`: tensor and sequence parallel, float32", "tp2",
         "torchtitan_:parallelize", f"{TORCHTITAN} torchtitan_:step"),
    Case("torchtitan", "Llama 3, `parallelize_llama`: both, float32", "dp2,tp2", "torchtitan_:parallelize",
         f"{TORCHTITAN} torchtitan_:step"),
    Case("anemoi-models", "attention over 13 nodes of a grid, 7 and 6 on a rank", "cp2", "anemoi_:parallelize", ANEMOI),
    Case("anemoi-models", "the same, gradients of a rank's nodes are not summed", "cp2", "anemoi_:without_sum", ANEMOI,
         NOT_SAME, "attention over 13 nodes of a grid, 7 and 6 on a rank", PLANTED),
]  # fmt: skip


@dataclass
class Row:
    """What came of a case.

    Attributes:
        case: the case.
        verdict: verify's verdict; "fails" if there is none.
        seconds: of the whole command, from start to exit.
        first: where the two first differ, in verify's words; or why there is no verdict.
        output: all that verify printed.
    """

    case: Case
    verdict: str
    seconds: float
    first: str
    output: str


def install(name: str) -> Path:
    """Install a framework's requirements into a folder of its own, unless they are there. Returns the folder."""
    requirements = PROGRAMS / "requirements" / f"{name}.txt"
    folder = CACHE / name
    installed = folder / "requirements.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        print(f"installing {requirements.name} into {folder}", flush=True)
        # The lists are complete: pip must not choose other versions, or another build of PyTorch.
        flags = ["--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        environment = dict(os.environ)
        if name in FROM_SOURCE:
            # It is built with the setuptools and the PyTorch of the list under every framework.
            flags.append("--no-build-isolation")
            environment |= {"PYTHONPATH": str(install("torch")), **FROM_SOURCE[name]}
        command = [sys.executable, "-m", "pip", "install", *flags, "-r", str(requirements)]
        subprocess.run(command, check=True, env=environment)
        installed.write_text(requirements.read_text())
    return folder


def version(name: str) -> str:
    """The version of a framework: that of the package with its name in its requirements."""
    text = (PROGRAMS / "requirements" / f"{name}.txt").read_text()
    match = re.search(rf"^{name}==(\S+)", text, re.MULTILINE)
    assert match is not None
    return match[1]


def run(case: Case) -> Row:
    """Verify a program in the environment of its framework."""
    folders = [SOURCE, install("torch")]
    if case.framework != "torch":
        folders.insert(1, install(case.framework))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    settings = case.settings.split()
    position = settings.index("--model")
    model = settings[position + 1]
    del settings[position : position + 2]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        # -S: no package of this Python's own.
        command = [sys.executable, "-S", "-m", "mmm_verify", model, "--parallelize", case.parallelize, *settings,
                   "--mesh", case.mesh, "--timeout", TIMEOUT, "--json", file.name]  # fmt: skip
        begin = time.monotonic()
        process = subprocess.run(
            command, env=environment, cwd=PROGRAMS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        seconds = time.monotonic() - begin
        written = Path(file.name).read_text()
    if not written:
        return Row(case, "fails", seconds, process.stdout.strip().splitlines()[-1], process.stdout)
    (verdict,) = json.loads(written)["verdicts"]
    return Row(case, verdict["result"], seconds, explained(verdict), process.stdout)


def explained(verdict: dict[str, Any]) -> str:
    """Where the two first differ, as one cell of the table."""
    if not verdict["findings"]:
        return str(verdict["reason"])
    finding = verdict["findings"][0]
    rank = "" if finding["rank"] is None else f" on rank {finding['rank']}"
    return f"{finding['stage']}: {finding['name']}{rank} {finding['relation']}"


def problem(row: Row, lines: dict[tuple[str, str], str]) -> str:
    """Why a row must not be in the table; empty if it may.

    Args:
        row: the row.
        lines: (framework, program) → its line of the table.
    """
    case = row.case
    name = f"{case.framework}, {case.program}"
    if row.verdict != case.expected:
        return f"{name}: {row.verdict}, and {case.expected} was expected: {row.first}"
    control = lines.get((case.framework, case.control), "")
    if row.verdict == NOT_SAME and f"| {SAME} |" not in control:
        return f'{name}: its control, "{case.control}", is not "{SAME}" in the table'
    return ""


def line_of(row: Row) -> str:
    """The line of the table."""
    case = row.case
    verdict = row.verdict
    if verdict != SAME:
        verdict = f"**{verdict}**"
    first = row.first.replace("|", "\\|")
    framework = f"{case.framework} {version(case.framework)}"
    cells = [framework, case.program, case.mesh, verdict, f"{row.seconds:.0f}", first, case.report]
    return f"| {' | '.join(cells)} |"


def lines_in(page: str) -> dict[tuple[str, str], str]:
    """The lines of the table in a page: (framework, program) → line."""
    inner = page.partition(BEGIN)[2].partition(END)[0]
    lines = {}
    for line in inner.splitlines():
        match = re.match(r"\| (\S+) [0-9]\S* \| (.+?) \|", line)
        if match is not None:
            lines[match[1], match[2]] = line
    return lines


def with_table(page: str, lines: dict[tuple[str, str], str]) -> str:
    """A page with the table in it, in the order of `CASES`."""
    head = [
        "| framework | program | ranks | verdict | seconds | first difference | report |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = [(case.framework, case.program) for case in CASES]
    body = [lines[name] for name in names if name in lines]
    n_same = sum(f"| {SAME} |" in line for line in body)
    python = f"Python {platform.python_version()}, PyTorch {version('torch')} for CPUs"
    foot = f"{n_same} of {len(body)} programs are the same as on one device. Made with {python}."
    inner = "\n".join([BEGIN, "", *head, *body, "", foot, END])
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: inner, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these in framework or program")
    parser.add_argument("--table", type=Path, help="write the rows into the table of this page")
    args = parser.parse_args()
    cases = CASES
    if args.only:
        cases = [case for case in CASES if any(word in f"{case.framework} {case.program}" for word in args.only)]
        if not cases:
            parser.error(f"--only {' '.join(args.only)}: no case has one of these words")
    page = BEGIN + END
    if args.table:
        page = args.table.read_text(encoding="utf-8")
    # Rows that are not run now stay as they are in the page.
    lines = lines_in(page)
    rows = []
    for case in cases:
        row = run(case)
        rows.append(row)
        lines[case.framework, case.program] = line_of(row)
        print(
            f"{case.framework}, {case.program}, {case.mesh}: {row.verdict}, {row.seconds:.0f} s {row.first}", flush=True
        )
        if args.only or row.verdict != case.expected:
            print(row.output, flush=True)
    if args.table:
        args.table.write_text(with_table(page, lines), encoding="utf-8")
    problems = [problem(row, lines) for row in rows]
    if any(problems):
        sys.exit("\n".join(filter(None, problems)))


if __name__ == "__main__":
    main()
