"""A found plan as a function in PyTorch's own calls, with the reasons as comments."""

from __future__ import annotations

import importlib.util
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from mmm_verify.errors import ConfigError, RecordError
from mmm_verify.propose.report import group_reason, groups_by_pattern
from mmm_verify.propose.tensor import TensorPlan
from mmm_verify.propose.trace import is_transposed
from mmm_verify.propose.trial import Fix, Group
from mmm_verify.propose.units import Units

WIDTH = 100
INDENT = "    "


@dataclass(frozen=True)
class Axes:
    """The names of a mesh's axes: whose ranks have different samples, outermost first, and which shards matrices."""

    batch: tuple[str, ...]
    tensor: str = ""


def write_code(model: nn.Module, name: str, axes: Axes, units: Units | None, plan: TensorPlan | None) -> str:
    """The source of a module with ``parallelize(model, mesh)``.

    Args:
        name: of the model, as it was given. units, plan: what was found; None for what the mesh has no axis for.
    """
    tensor = _tensor(model, plan, axes) if plan is not None and plan.groups else []
    data = _data(model, units, axes) if units is not None else []
    body = [*tensor, *([""] if tensor and data else []), *data] or ["pass  # nothing was found"]
    table = _table(model, plan) if tensor and plan is not None else []
    used = "\n".join([*table, *body])
    lines = [
        f'"""{name}, made parallel: a plan that `mmm verify` found."""',
        "",
        *_imports(used),
        *(["", *table] if table else []),
        "",
        "",
        "def parallelize(model, mesh):",
        *(f"{INDENT}{line}".rstrip() for line in body),
    ]
    return "\n".join(lines) + "\n"


def load_code(code: str, path: Path | None) -> Callable[[nn.Module, Any], None]:
    """Write code, and import what it defines: what is verified is what is written.

    Args:
        path: of the file; without it the code is written where it is deleted again.

    Raises:
        RecordError: the file cannot be written. ConfigError: it imports what is not installed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder) / "plan.py"
        try:
            file.write_text(code, encoding="utf-8")
        except OSError as error:
            raise RecordError(f"--write {file} cannot be written: {error.strerror}") from None
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


def _imports(used: str) -> list[str]:
    modules = {
        "torch.distributed.fsdp": ["fully_shard"],
        "torch.distributed.tensor.parallel": ["ColwiseParallel", "RowwiseParallel", "parallelize_module"],
        "mmm.parallel": ["PartialGradient"],
        "mmm.parallel.dp.sync_batch_norm": ["sync_batch_norm"],
        "mmm.parallel.tp.sections": ["OwnedRowwise", "SectionedColwise"],
    }
    needed = {module: [name for name in names if f"{name}(" in used] for module, names in modules.items()}
    lines = [f"from {module} import {', '.join(names)}" for module, names in needed.items() if names]
    first_own = next((index for index, line in enumerate(lines) if line.startswith("from mmm")), 0)
    return [*lines[:first_own], "", *lines[first_own:]] if first_own else lines


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH - len(INDENT), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _table(model: nn.Module, plan: TensorPlan) -> list[str]:
    """The styles of the modules, a group after the other."""
    styles: dict[str, str] = {}
    for group in plan.groups:
        styles |= _styles(model, group, plan.parts)
    lines = [f"TENSOR = {{  # module: how its weight is sharded over {plan.parts} ranks"]
    for groups in groups_by_pattern(plan.groups).values():
        lines += _comment(group_reason(groups[0], len(groups), plan.parts), INDENT)
        paths = [path for group in groups for path in _styles(model, group, plan.parts)]
        lines += [f'{INDENT}"{path}": {style},' for path, style in _without_numbers(model, paths, styles).items()]
    return [*lines, "}"]


def _styles(model: nn.Module, group: Group, parts: int) -> dict[str, str]:
    """By path, the style of a module as source."""
    styles: dict[str, str] = {}
    for path, sections in group.producers.items():
        transposed = is_transposed(model.get_submodule(path))
        plain = len(sections) == 1 and sections[0][1] == parts
        words = [] if plain else [str(section) for section in sections]
        own = words or transposed or path in group.written
        styles[path] = f"SectionedColwise({', '.join(words)})" if own else "ColwiseParallel()"
    styles |= dict.fromkeys(group.between, "PartialGradient()")
    for path in group.consumers:
        transposed = is_transposed(model.get_submodule(path))
        own = transposed or path in group.written
        styles[path] = "OwnedRowwise()" if own else "RowwiseParallel()"
    return styles


def matches(pattern: str, name: str) -> bool:
    """Whether a module's path matches a pattern, component by component."""
    parts = name.split(".")
    wanted = pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _without_numbers(model: nn.Module, paths: Sequence[str], styles: dict[str, str]) -> dict[str, str]:
    """Paths with their styles; with stars for numbers where that means the same modules."""
    named = [path for path, _ in model.named_modules(remove_duplicate=False)]
    result: dict[str, str] = {}
    for path in paths:
        chosen = path
        for pattern in _patterns(path):
            meant = [other for other in named if matches(pattern, other)]
            if all(styles.get(other) == styles[path] for other in meant) and _everywhere(pattern, meant, named):
                chosen = pattern
                break
        result[chosen] = styles[path]
    return result


def _patterns(path: str) -> list[str]:
    """A path with stars for all numbers, for all but the last, …"""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    starred = (set(numbers[:count]) for count in range(len(numbers), 0, -1))
    return [".".join("*" if index in stars else part for index, part in enumerate(parts)) for stars in starred]


def _everywhere(pattern: str, meant: Sequence[str], named: Sequence[str]) -> bool:
    """Whether each module that a star stands for has what the pattern names; `parallelize_module` warns of others."""
    parts = pattern.split(".")
    for index in (index for index, part in enumerate(parts) if part == "*"):
        above = [path for path in named if path and matches(".".join(parts[: index + 1]), path)]
        if any(not any(path == one or path.startswith(f"{one}.") for path in meant) for one in above):
            return False
    return True


def _tensor(model: nn.Module, plan: TensorPlan, axes: Axes) -> list[str]:
    """Statements: shard the matrices, divide what the modules keep."""
    fixes: list[Fix] = list(dict.fromkeys(fix for group in plan.groups for fix in group.fixes))
    lines = [f'if "{axes.tensor}" in mesh.mesh_dim_names:', f'{INDENT}tp = mesh["{axes.tensor}"]']
    lines.append(f"{INDENT}parallelize_module(model, tp, TENSOR)")
    for name in dict.fromkeys(name for _, name in fixes):
        paths = [path for path, attribute in fixes if attribute == name]

        def divide(each: str, name: str = name) -> str:
            return f"{each}.{name} //= tp.size()"

        lines += [f"{INDENT}{line}" for line in _statements(model, paths, divide)]
    if fixes:
        lines.insert(3, f"{INDENT}# Of what its forward counts, each rank has a part.")
    return lines


def _data(model: nn.Module, units: Units, axes: Axes) -> list[str]:
    """Statements: synchronize batch norms, shard each unit, then the root."""
    wanted = " and ".join(f'"{axis}" in mesh.mesh_dim_names' for axis in axes.batch)
    names = ", ".join(f'"{axis}"' for axis in axes.batch)
    lines = [f"if {wanted}:", f"{INDENT}dp = mesh[{names}]"]
    if units.batch_norms:
        lines += _comment("Batch norms take the statistics of the batch of all ranks.", INDENT)
        lines.append(f"{INDENT}sync_batch_norm(model, dp)")
    for why, paths in (
        ("Repeated blocks: each is gathered for its own forward and backward.", units.blocks),
        ("Large modules.", units.large),
    ):
        if paths:
            lines += _comment(why, INDENT)
            statements = _statements(model, paths, lambda each: f"fully_shard({each}, mesh=dp)")
            lines += [f"{INDENT}{line}" for line in statements]
    for pattern, why in units.root.items():
        lines += _comment(f"{pattern} goes with the rest: {why}.", INDENT)
    lines += _comment("The rest.", INDENT)
    return [*lines, f"{INDENT}fully_shard(model, mesh=dp)"]


def _statements(model: nn.Module, paths: Iterable[str], statement: Callable[[str], str]) -> list[str]:
    """A statement for each module, in a loop over a list where all elements of it are meant."""
    lists: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        parts = path.split(".")
        last = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
        key = (".".join(parts[:last]), ".".join(parts[last + 1 :])) if last >= 0 else ("", path)
        lists.setdefault(key, []).append(path)
    lines, others = [], []
    for (parent, rest), own in lists.items():
        numbered = own != [rest]
        if numbered and len(own) > 1 and len(own) == len(list(model.get_submodule(parent).children())):
            lines += [f"for block in {expression('model', parent)}:", INDENT + statement(expression("block", rest))]
        else:
            others += own
    if len(others) <= 2:
        return lines + [statement(expression("model", path)) for path in others]
    lines.append("for path in (")
    listed = ", ".join(f'"{path}"' for path in others)
    lines += [f"{INDENT}{line}" for line in textwrap.wrap(f"{listed},", WIDTH - 3 * len(INDENT))]
    return [*lines, "):", INDENT + statement("model.get_submodule(path)")]


def expression(root: str, path: str) -> str:
    """``model``, ``layers.0.mlp`` → ``model.layers[0].mlp``."""
    text = root
    for part in path.split(".") if path else ():
        if part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier():
            text += f".{part}"
        else:
            return f'{root}.get_submodule("{path}")'
    return text
