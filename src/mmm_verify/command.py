"""``mmm-verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmm_verify.audit import main as audit
from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.program.command import Once, add_shared_flags, names_a_program
from mmm_verify.program.command import main as verify_script

if TYPE_CHECKING:
    from mmm_verify.subject import Subject

EPILOG = """\
MODULE:NAME is a function of yours; modules in the working directory are found too:

  MODEL          make_model() -> nn.Module, on the CPU; or hf:config.json, a model of transformers with random weights
  --parallelize  parallelize(model, mesh) -> what the ranks run, or None if it changes the model in place
  --batch        make_batch() -> the global batch: a tensor, or a tuple, list or dict of tensors, samples along dim 0
  --step         step(model, batch) -> the mean loss; a third parameter receives the mesh (None on one device)

docs/verify.md says more.

examples:
  %(prog)s mlp:make_model --write plan.py
  %(prog)s --program train.py --lr 0.1 --ranks 1,4
  %(prog)s audit        # versions installed here that are known to be wrong
exit codes: 0 the same; 1 not the same; 2 not comparable, rounded to float32, or wrong arguments
"""
# Has ranks compute with parts of a field: function of (subject, value of --space, timeout) that returns the subject.
SplitSpace = Callable[["Subject", str, float], "Subject"]
# Added to an error about --parallelize.
A_PLAN = (
    "it names a function parallelize(model, mesh), such as the one of `{program} MODEL --write plan.py`, which is "
    "plan:parallelize; without --parallelize a plan is found"
)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.register("action", None, Once)
    parser.add_argument("model", metavar="MODEL", help="what makes the model on one device, see below")
    parser.add_argument(
        "--parallelize",
        metavar="MODULE:NAME",
        help="function that makes the model parallel; default: a plan is found",
    )
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="verify an unedited script instead, as torchrun starts it; `%(prog)s --program --help` says how",
    )
    parser.add_argument("--write", metavar="FILE.py", type=Path, help="write the plan that is found as code")
    parser.add_argument(
        "--space",
        metavar="rows=N",
        help="split the rows of the model's field over N ranks instead (`mmm verify`, which comes with mmm)",
    )
    parser.add_argument(
        "--batch",
        metavar="MODULE:NAME",
        help="function that makes the global batch; default: a batch is made that the model takes",
    )
    parser.add_argument(
        "--step",
        metavar="MODULE:NAME",
        help="function that computes the loss; default: cross-entropy, or mean squared error, of (inputs, targets)",
    )
    parser.add_argument(
        "--mesh",
        action="extend",
        nargs="+",
        help="one or more meshes, as axes with sizes: dp2,tp2 (default: dp2; for a plan that is found: dp2 tp2)",
    )
    parser.add_argument(
        "--batch-axes",
        nargs="*",
        metavar="AXIS",
        help="axes whose ranks have different samples; default: those called dp, data, fsdp, …",
    )
    parser.add_argument(
        "--local-batch",
        metavar="MODULE:NAME",
        help="function (batch, mesh) -> a rank's batch, if it is not an equal part of the samples",
    )
    parser.add_argument("--optimizer", metavar="MODULE:NAME", help="function parameters -> optimizer; default: SGD")
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="where the program's framework keeps its gradients and weights: its name, or MODULE:NAME of an Adapter",
    )
    parser.add_argument(
        "--dtype",
        default="float64",
        metavar="TYPE",
        help="float64, float32 or bf16: what both compute in; in the latter two, the tolerance is measured "
        "(default: float64)",
    )
    add_shared_flags(parser)
    return parser


def main(
    argv: Sequence[str] | None = None,
    program: str = "mmm-verify",
    importer: Callable[[str], ModuleType] | None = None,
    split_space: SplitSpace | None = None,
) -> int:
    """Run the command.

    Args:
        argv: the arguments. Default: those of this process.
        program: the command's name, for messages.
        importer: imports torchvision, as in `mmm_verify.propose.models.load_model`.
        split_space: what --space does. None: this command has no such flag.

    Returns:
        The exit code: 2 for a user's error, which is printed as one message.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # PyTorch warns where NumPy is not installed, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        if arguments[:1] == ["audit"]:
            return audit(arguments[1:], program)
        if names_a_program(arguments):
            return verify_script(arguments, program)
        return _verify(_parser(program).parse_args(arguments), program, importer, split_space)
    except BrokenPipeError:
        # The reader, such as `head`, has ended. Python's own flush at exit must not find the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        # A mistake of this package keeps its traceback.
        if not is_for_user(error):
            raise
        print(f"{program}: error: {_printable(str(error))}", file=sys.stderr)
        return 2


def _printable(text: str) -> str:
    """Escape the characters of a message that would move a terminal's cursor or change its colours."""
    shown = []
    for char in text:
        if char.isprintable() or char in "\n\t":
            shown.append(char)
        else:
            # ascii() gives the escape in quotes.
            shown.append(ascii(char)[1:-1])
    return "".join(shown)


def _load_optional(spec: str | None, flag: str) -> Any:
    """Load the function that a flag names; None if the flag is not given."""
    from mmm_verify.subject import load_function

    if spec is None:
        return None
    return load_function(spec, flag)


def _load_parallelize(spec: str | None, program: str) -> Any:
    """Load the function of --parallelize. An error also says where such a function can come from."""
    try:
        return _load_optional(spec, "--parallelize")
    except ConfigError as error:
        raise ConfigError(f"{error}; {A_PLAN.format(program=program)}") from None


def _subjects(args: argparse.Namespace, program: str, importer: Callable[[str], ModuleType] | None) -> list[Subject]:
    """Make what is verified from the arguments, once for each mesh.

    A program without --parallelize has no plan yet; see `_with_found_plan`.

    Raises:
        UserError: an argument is wrong, or the model cannot be used.
    """
    # These modules import torch, which takes seconds: --help and a misspelt flag do not wait for it.
    from mmm_verify.dtypes import parse_dtype
    from mmm_verify.frameworks import load_adapter
    from mmm_verify.propose.models import SAMPLES, default_batch, load_model
    from mmm_verify.subject import make_subject

    if args.write is not None and args.parallelize is not None:
        raise ConfigError(
            "--write writes the plan that is found, and with --parallelize none is looked for: leave one of them out"
        )
    dtype = parse_dtype(args.dtype)
    model = load_model(args.model, importer)
    parallelize_fn = _load_parallelize(args.parallelize, program)
    step_fn = _load_optional(args.step, "--step") or model.step_fn
    batch_fn = _load_optional(args.batch, "--batch")
    local_batch_fn = _load_optional(args.local_batch, "--local-batch")
    optimizer_fn = _load_optional(args.optimizer, "--optimizer")
    adapter = None
    if args.adapter is not None:
        adapter = load_adapter(args.adapter)
    meshes = args.mesh
    if not meshes:
        # A plan that is found has FSDP over dp and tensor parallelism over tp: prove each by itself.
        meshes = ["dp2", "tp2"] if parallelize_fn is None else ["dp2"]
        if args.space is not None:
            meshes = ["dp1"]
    subjects = []
    for mesh in meshes:
        subject = make_subject(
            model.model_fn,
            parallelize_fn,
            batch_fn,
            step_fn,
            mesh,
            batch_axes=args.batch_axes,
            local_batch_fn=local_batch_fn,
            optimizer_fn=optimizer_fn,
            adapter=adapter,
            dtype=dtype,
        )
        subjects.append(subject)
    if args.batch is None:
        # One batch for all meshes, whose samples divide over the ranks of each.
        n_parts = math.lcm(*(subject.n_parts for subject in subjects))
        n_samples = n_parts * math.ceil(SAMPLES / n_parts)
        batch_fn = default_batch(model, n_samples, args.timeout)
        subjects = [replace(subject, batch_fn=batch_fn) for subject in subjects]
    return subjects


def _verify(
    args: argparse.Namespace,
    program: str,
    importer: Callable[[str], ModuleType] | None,
    split_space: SplitSpace | None,
) -> int:
    """Verify on one or more meshes.

    Returns:
        The largest exit code of them.

    Raises:
        UserError: an argument is wrong, or the model cannot be used.
    """
    # These too import torch.
    from mmm_verify.run import verify_subject
    from mmm_verify.verdict import Verdict, write_json

    if args.space is not None and (args.parallelize or args.write):
        raise ConfigError("--space splits the model itself: leave --parallelize and --write out")
    if args.space is not None and split_space is None:
        raise ConfigError("--space comes with mmm, whose command is `mmm verify`")
    subjects = _subjects(args, program, importer)
    # The exit code of meshes that a found plan has nothing for.
    without_plan = 0
    if split_space is not None and args.space is not None:
        subjects = [split_space(subject, args.space, args.timeout) for subject in subjects]
    elif args.parallelize is None:
        subjects, without_plan = _with_found_plan(subjects, args.model, args.write, args.timeout)
    verdicts: list[Verdict] = []
    for subject in subjects:
        verdict = verify_subject(subject, args.timeout)
        # Each verdict as soon as there is one: a mesh may take minutes.
        print(verdict, flush=True)
        if verdict.details:
            print(verdict.details.rstrip(), flush=True)
        verdicts.append(verdict)
    # The plan that was found shards nothing on any of the meshes.
    if not verdicts:
        return without_plan
    worst = max(verdict.exit_code for verdict in verdicts)
    if args.json is not None:
        write_json(verdicts, subjects[-1], args.json)
    if not args.mesh:
        # Nobody asked for tp2: a model without a tensor-parallel plan is not an error.
        return worst
    return max(worst, without_plan)


def _with_found_plan(
    subjects: list[Subject], model: str, path: Path | None, timeout: float
) -> tuple[list[Subject], int]:
    """Find a plan for the model, print it and write it to `path`.

    Returns:
        The subjects with the plan, and an exit code: 2 if some are left out, because it shards nothing on their mesh.
    """
    import torch

    from mmm_verify.propose.code import load_code
    from mmm_verify.propose.find import find_plan

    # Its trials need float64, in which a wrong sum and rounding are far apart.
    in_float64 = [replace(subject, dtype=torch.float64) for subject in subjects]
    proposal = find_plan(in_float64, model, timeout)
    print(proposal, flush=True)
    # What is verified below is the written code, as a user would import it.
    parallelize_fn = load_code(proposal.code, path)
    if path is not None:
        print(f"  written         {path}: parallelize(model, mesh)")
    print(flush=True)
    shards_matrices = proposal.tensor is not None and proposal.tensor.shards
    with_plan = []
    for subject in subjects:
        other_axes = set(subject.axes) - set(subject.batch_axes)
        if other_axes and not shards_matrices:
            print(f"no plan for {subject.layout}: no matrices were found to shard over tp", flush=True)
        else:
            with_plan.append(replace(subject, parallelize_fn=parallelize_fn))
    if len(with_plan) < len(subjects):
        return with_plan, 2
    return with_plan, 0
