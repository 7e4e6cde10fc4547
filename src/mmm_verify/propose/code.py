"""Writes a found plan as a function of PyTorch's own calls, with the reasons as comments."""

from __future__ import annotations

import importlib.util
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from mmm_verify.errors import ConfigError, RecordError
from mmm_verify.propose.channels import Sections
from mmm_verify.propose.report import WIDTH, attention_reason, by_pattern, group_reason, groups_by_pattern, wrapped
from mmm_verify.propose.tensor import TensorPlan
from mmm_verify.propose.trace import is_convolution, is_transposed, own_names
from mmm_verify.propose.trial import Group
from mmm_verify.propose.units import Units

INDENT = "    "
# What a plan may import, by module.
IMPORTS = {
    "torch.distributed.fsdp": ["fully_shard"],
    "torch.distributed.tensor.parallel": ["ColwiseParallel", "RowwiseParallel", "parallelize_module"],
    "mmm.parallel": ["PartialGradient"],
    "mmm.parallel.dp.sync_batch_norm": ["sync_batch_norm"],
    "mmm.parallel.tp.parts": ["GatheredChannels", "ShardedAttention", "ShardedModule"],
    "mmm.parallel.tp.sections": ["OwnedRowwise", "SectionedColwise"],
}


@dataclass(frozen=True)
class Axes:
    """The names of a mesh's axes.

    Attributes:
        batch: axes whose ranks have different samples, outermost first.
        tensor: axis over which matrices are sharded; empty if there is none.
    """

    batch: tuple[str, ...]
    tensor: str = ""


def write_code(
    model: nn.Module,
    name: str,
    axes: Axes,
    units: Units | None,
    plan: TensorPlan | None,
) -> str:
    """The source of a module with ``parallelize(model, mesh)``.

    Args:
        model: the model.
        name: name of the model, as the user gave it.
        axes: names of the mesh's axes.
        units: units for FSDP; None if the mesh has no axis for it.
        plan: plan for tensor parallelism; None if the mesh has no axis for it.
    """
    table: list[str] = []
    body: list[str] = []
    if plan is not None and plan.shards:
        table = _table(model, plan)
        body += _tensor(plan, axes)
    # After tensor parallelism: FSDP shards what that leaves on a rank.
    if units is not None:
        if body:
            body.append("")
        body += _data(model, units, axes)
    if not body:
        body.append("pass  # nothing was found")
    lines = [f'"""{name}, made parallel: a plan that `mmm verify` found."""', ""]
    lines += _imports("\n".join([*table, *body]))
    if table:
        lines += ["", *table]
    if any("averaged(" in line for line in body):
        lines += AVERAGED.rstrip().split("\n")
    lines += ["", "", "def parallelize(model, mesh):"]
    # Empty lines get no spaces.
    lines += [line.rstrip() for line in _indented(body)]
    return "\n".join(lines) + "\n"


def _quoted(names: Iterable[str]) -> str:
    """Names as source: ``"wq", "wk"``."""
    return ", ".join(f'"{name}"' for name in names)


def _indented(lines: Iterable[str]) -> list[str]:
    """Lines of source, one level deeper."""
    return [f"{INDENT}{line}" for line in lines]


def load_code(code: str, path: Path | None) -> Callable[[nn.Module, Any], None]:
    """Write code to a file and import its ``parallelize``: what is verified is what is written.

    Args:
        code: the source.
        path: the file to write. None: a temporary one.

    Raises:
        RecordError: the file cannot be written.
        ConfigError: the code imports something that is not installed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder) / "plan.py"
        try:
            file.write_text(code, encoding="utf-8")
        except OSError as error:
            raise RecordError(f"--write {file} cannot be written: {error.strerror}") from None
        # By its path: the file's folder need not be on sys.path.
        spec = importlib.util.spec_from_file_location("found_plan", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the plan needs {error.name}, which is not installed here (pip install mmm): PyTorch has no style for "
                "matrices that have several parts, or that a module transposes or writes in place"
            ) from None
    return module.parallelize


def _imports(code: str) -> list[str]:
    """Import the names that the code calls: PyTorch's first, then this project's after an empty line."""
    torch_lines = []
    mmm_lines = []
    if "averaged(" in code:
        torch_lines.append("import torch.distributed as dist")
    for module, names in IMPORTS.items():
        # Every name is called in the code, as a style or as a function.
        called = [name for name in names if f"{name}(" in code]
        if not called:
            continue
        line = f"from {module} import {', '.join(called)}"
        if module.startswith("torch"):
            torch_lines.append(line)
        else:
            mmm_lines.append(line)
    if torch_lines and mmm_lines:
        torch_lines.append("")
    return torch_lines + mmm_lines


def _comment(text: str) -> list[str]:
    """A text as comments, which end a level before the other lines: most are indented later."""
    prefix = f"{INDENT}# "
    return textwrap.wrap(text, WIDTH - len(INDENT), initial_indent=prefix, subsequent_indent=prefix)


def _table(model: nn.Module, plan: TensorPlan) -> list[str]:
    """The styles of the modules as a dict, one group after another."""
    styles = _all_styles(model, plan)
    lines = [f"TENSOR = {{  # module: how its weight is sharded over {plan.n_ranks} ranks"]
    for groups in groups_by_pattern(plan.groups):
        # One comment for groups that are alike.
        reason = group_reason(groups[0], len(groups), plan.n_ranks)
        lines += _comment(reason)
        paths: list[str] = []
        for group in groups:
            paths += _styles(model, group, plan.n_ranks)
        for path, style in _without_numbers(model, paths, styles).items():
            lines += _entry(path, style)
    for paths in by_pattern(plan.attentions):
        lines += _comment(attention_reason(paths))
        for path, style in _without_numbers(model, paths, styles).items():
            lines += _entry(path, style)
    lines.append("}")
    return lines


def _all_styles(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """The style of each module in a plan, as source, by path."""
    styles: dict[str, str] = {}
    for group in plan.groups:
        styles |= _styles(model, group, plan.n_ranks)
    styles |= dict.fromkeys(plan.attentions, "ShardedAttention()")
    return styles


def _entry(path: str, style: str) -> list[str]:
    """An entry of the table, on several lines if it is long."""
    return wrapped(f'"{path}": {style},', INDENT, 2 * INDENT)


def _styles(model: nn.Module, group: Group, n_ranks: int) -> dict[str, str]:
    """The style of each module in a group, as source, by path."""
    styles: dict[str, str] = {}
    for path, sections in group.producers.items():
        module = model.get_submodule(path)
        if is_convolution(module):
            # The weight first, then the bias: output channels are the first dim of both.
            names = sorted(own_names(module), reverse=True)
            dims = dict.fromkeys(names, (0, sections))
            styles[path] = f'ShardedModule({_dims(dims, n_ranks)}, output="own")'
        elif not _is_plain(sections, n_ranks):
            arguments = ", ".join(map(str, sections))
            styles[path] = f"SectionedColwise({arguments})"
        elif _needs_own_style(model, group, path):
            styles[path] = "SectionedColwise()"
        else:
            styles[path] = "ColwiseParallel()"
    for path in group.between:
        prefix = f"{path}."
        dims = {}
        for name, entry in group.divided.items():
            if name.startswith(prefix):
                dims[name.removeprefix(prefix)] = entry
        if dims:
            styles[path] = f'ShardedModule({_dims(dims, n_ranks)}, inputs="own", output="own")'
        else:
            styles[path] = "PartialGradient()"
    for path in group.gathered:
        styles[path] = "GatheredChannels()"
    for path in group.consumers:
        module = model.get_submodule(path)
        if is_convolution(module):
            # The ranks' outputs are summed: only one of them may add the bias.
            once = ""
            if "bias" in own_names(module):
                once = 'once=["bias"], '
            styles[path] = f'ShardedModule({{"weight": 1}}, {once}inputs="own")'
        elif _needs_own_style(model, group, path):
            styles[path] = "OwnedRowwise()"
        else:
            styles[path] = "RowwiseParallel()"
    return styles


def _dims(dims: Mapping[str, tuple[int, Sections]], n_ranks: int) -> str:
    """The dims of parameters, as source: a number where a rank has one piece, else with the sections."""
    entries = []
    for name, (dim, sections) in dims.items():
        entry: object = (dim, sections)
        if _is_plain(sections, n_ranks):
            entry = dim
        entries.append(f'"{name}": {entry}')
    listed = ", ".join(entries)
    return f"{{{listed}}}"


def _is_plain(sections: Sections, n_ranks: int) -> bool:
    """Whether there is one section, divided among all ranks: PyTorch's own styles shard like that."""
    return len(sections) == 1 and sections[0][1] == n_ranks


def _needs_own_style(model: nn.Module, group: Group, path: str) -> bool:
    """Whether PyTorch's styles do not fit: the weight is (in, out), or the output is written in place."""
    return path in group.written or is_transposed(model.get_submodule(path))


def matches(pattern: str, path: str) -> bool:
    """Whether a module's path matches a pattern, name by name."""
    names = path.split(".")
    patterns = pattern.split(".")
    if len(names) != len(patterns):
        return False
    return all(map(fnmatchcase, names, patterns))


def _without_numbers(model: nn.Module, paths: Sequence[str], styles: dict[str, str]) -> dict[str, str]:
    """Paths with their styles, with stars in place of numbers if that means the same modules.

    Args:
        paths: the modules of groups that are alike.
        styles: the styles of all modules in the plan.
    """
    # With all names of a module that has several.
    all_paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    result: dict[str, str] = {}
    for path in paths:
        key = path
        # The first pattern has the most stars, and stands for the most modules.
        for pattern in _patterns(path):
            matching = [other for other in all_paths if matches(pattern, other)]
            same_style = all(styles.get(other) == styles[path] for other in matching)
            if same_style and _everywhere(pattern, matching, all_paths):
                key = pattern
                break
        result[key] = styles[path]
    return result


def _patterns(path: str) -> list[str]:
    """A path with stars in place of all numbers, of all but the last, …"""
    names = path.split(".")
    # Where the numbers stand: [1, 3] in "layers.0.experts.2".
    positions = [index for index, name in enumerate(names) if name.isdigit()]
    patterns = []
    for count in range(len(positions), 0, -1):
        starred = list(names)
        for index in positions[:count]:
            starred[index] = "*"
        patterns.append(".".join(starred))
    return patterns


def _everywhere(pattern: str, matching: Sequence[str], all_paths: Sequence[str]) -> bool:
    """Whether each module that a star stands for has what the pattern names.

    `parallelize_module` warns of those that do not.
    """
    names = pattern.split(".")
    for index, name in enumerate(names):
        if name != "*":
            continue
        up_to_star = ".".join(names[: index + 1])
        for path in all_paths:
            if not path or not matches(up_to_star, path):
                continue
            inside = f"{path}."
            if not any(other == path or other.startswith(inside) for other in matching):
                return False
    return True


def _tensor(plan: TensorPlan, axes: Axes) -> list[str]:
    """Statements that shard the matrices and divide the integers that modules keep."""
    lines = [
        f'if "{axes.tensor}" in mesh.mesh_dim_names:',
        f'{INDENT}tp = mesh["{axes.tensor}"]',
        f"{INDENT}parallelize_module(model, tp, TENSOR)",
    ]
    # Attribute → paths of the modules that keep it. A dict in place of a list keeps each once, in order.
    fixes: dict[str, dict[str, None]] = {}
    for group in plan.groups:
        for path, name in group.fixes:
            fixes.setdefault(name, {})[path] = None
    if fixes:
        lines.append(f"{INDENT}# Each rank has a part of what its forward counts.")
    for name, paths in fixes.items():
        lines += _for_each(paths, f"model.get_submodule(path).{name} //= tp.size()")
    return lines


def _data(model: nn.Module, units: Units, axes: Axes) -> list[str]:
    """Statements that synchronize batch norms, shard each unit, and then the root."""
    conditions = [f'"{axis}" in mesh.mesh_dim_names' for axis in axes.batch]
    lines = [
        f"if {' and '.join(conditions)}:",
        f"{INDENT}dp = mesh[{_quoted(axes.batch)}]",
    ]
    if units.batch_norms:
        lines += _comment("Batch norms take the statistics of the batch of all ranks.")
        lines.append(f"{INDENT}sync_batch_norm(model, dp)")
    sharded = (
        ("Repeated blocks: each is gathered for its own forward and backward.", units.blocks),
        ("Large modules.", units.large),
    )
    for why, paths in sharded:
        if paths:
            lines += _comment(why)
            lines += _for_each(paths, "fully_shard(model.get_submodule(path), mesh=dp)")
    for pattern, why in units.root.items():
        lines += _comment(f"{pattern} goes with the rest: {why}.")
    scalars = []
    for name, parameter in model.named_parameters():
        if not parameter.ndim or not parameter.numel():
            scalars.append(name)
    if scalars:
        text = "FSDP shards no parameter without dims or elements: each rank has these, and averages their gradients."
        lines += _comment(text)
        lines += [
            f"{INDENT}scalars = [model.get_parameter(name) for name in ({_quoted(scalars)},)]",
            f"{INDENT}for scalar in scalars:",
            f"{INDENT}{INDENT}scalar.register_hook(lambda gradient: averaged(gradient, dp))",
        ]
    lines += _comment("The rest.")
    ignored = ""
    if scalars:
        ignored = ", ignored_params=set(scalars)"
    lines.append(f"{INDENT}fully_shard(model, mesh=dp{ignored})")
    return lines


# A function that the code defines where it calls it.
AVERAGED = """

def averaged(gradient, dp):
    for group in dp.get_all_groups():
        dist.all_reduce(gradient, dist.ReduceOp.AVG, group)
    return gradient
"""


def _for_each(paths: Iterable[str], statement: str) -> list[str]:
    """A loop over the paths of modules, inside a condition."""
    return [*wrapped(f"for path in [{_quoted(paths)}]:", INDENT, 2 * INDENT), f"{INDENT}{INDENT}{statement}"]
