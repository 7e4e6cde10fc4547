"""Describes what was found: each finding in a line or two, with its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mmm_verify.propose.channels import Sections
from mmm_verify.propose.tensor import TensorPlan
from mmm_verify.propose.trace import pattern_of
from mmm_verify.propose.trial import Fix, Group
from mmm_verify.propose.units import Units

# The widths of a line, and of the label that it begins with, in characters.
WIDTH = 100
LABEL = 14
MOST_REASONS = 6


def groups_by_pattern(groups: Sequence[Group]) -> list[list[Group]]:
    """Collect groups that differ only in the numbers in their paths."""
    alike: dict[object, list[Group]] = {}
    for group in groups:
        producers = []
        for path, sections in group.producers.items():
            # A single section is plain columns, whatever its width. Of a refused group only the names are printed.
            sections_that_count: object = sections
            if len(sections) <= 1 or group.refused:
                sections_that_count = 1
            producers.append((pattern_of(path), sections_that_count))
        consumers = tuple(map(pattern_of, group.consumers))
        between = tuple(map(pattern_of, group.between))
        fixes = tuple((pattern_of(path), name) for path, name in group.fixes)
        # Of groups that are refused, only those in the same place are alike.
        around = ""
        if group.refused:
            around = pattern_of(group.around)
        key = (tuple(producers), consumers, fixes, between, around)
        alike.setdefault(key, []).append(group)
    return list(alike.values())


def group_name(group: Group) -> str:
    """A group's name, such as ``layers.*.attention: wq, wk, wv → wo``."""
    label = ""
    prefix = ""
    if group.around:
        label = f"{pattern_of(group.around)}: "
        prefix = f"{group.around}."
    producers = ", ".join(path.removeprefix(prefix) for path in group.producers)
    consumers = ", ".join(path.removeprefix(prefix) for path in group.consumers)
    return f"{label}{producers} → {consumers}"


def group_reason(group: Group, count: int, n_ranks: int) -> str:
    """A group's name with what a reader has to know about it.

    Args:
        count: number of groups like this one.
        n_ranks: number of ranks that it is sharded over.
    """
    clauses = [_counted(group_name(group), count)]
    for path, sections in group.producers.items():
        module = path.rpartition(".")[2]
        if len(sections) > 1:
            # One matrix may have q, k and v, for example.
            widths = _widths(sections)
            clauses.append(f"{module} is fused of {widths} channels, and a rank needs a part of each")
        shared = [str(width) for width, n_shards in sections if n_shards == 1]
        if shared:
            listed = " and ".join(shared)
            clauses.append(f"all ranks need the same {listed} channels of {module}")
    divided = {name.rpartition(".")[0] for name in group.divided}
    for path in group.between:
        if path in divided:
            continue
        module = path.rpartition(".")[2]
        # So the ranks' gradients of its parameters must be summed.
        clauses.append(f"{module} sees only a rank's heads or channels: its gradients are partial")
    # Weight and bias of a normalization are named once, by their module.
    of_modules = [name for name in group.divided if _last(name, 1) in ("weight", "bias")]
    for name in group.divided:
        if name not in of_modules:
            clauses.append(f"a rank has its channels of {_last(name, 2)}")
    norms = dict.fromkeys(name.rpartition(".")[0] for name in of_modules)
    for path in norms:
        counts = ", ".join(f"{name} / {n_ranks}" for where, name in group.fixes if where == path)
        clause = f"{_last(path, 1)} is split by channels with it"
        clauses.append(f"{clause} ({counts})" if counts else clause)
    for path in group.gathered:
        clauses.append(f"{_last(path, 1)} needs the channels of all ranks: they are gathered for it")
    fixes = [fix for fix in group.fixes if fix[0] not in norms]
    if fixes:
        clauses.append(_divided(fixes, n_ranks))
    return "; ".join(clauses)


def _counted(name: str, count: int) -> str:
    """A name, with how many there are if it stands for several."""
    if count > 1:
        name += f" ({count} times)"
    return name


def _widths(sections: Sections) -> str:
    """The numbers of channels of a matrix's sections: ``512, 64, 64``."""
    return ", ".join(str(width) for width, _ in sections)


def _divided(fixes: Sequence[Fix], n_ranks: int) -> str:
    """Which integer attributes are divided by the number of ranks, in words. Each name is listed once."""
    names = dict.fromkeys(name for _, name in fixes)
    listed = " and ".join(names)
    return f"its forward counts by {listed}: divided by {n_ranks}"


def _last(path: str, count: int) -> str:
    """The last names of a path."""
    return ".".join(path.split(".")[-count:])


def by_pattern(paths: Sequence[str]) -> list[list[str]]:
    """Collect paths that differ only in their numbers."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(pattern_of(path), []).append(path)
    return list(alike.values())


def attention_reason(paths: Sequence[str]) -> str:
    """What a reader has to know about nn.MultiheadAttention in these places, which are alike."""
    name = _counted(pattern_of(paths[0]), len(paths))
    return f"{name}: attention by heads"


def describe(units: Units, plan: TensorPlan | None) -> str:
    """All findings, as text of 100 columns."""
    lines = ["found", *_describe_units(units)]
    if plan is not None:
        lines += _describe_tensor(plan)
    return "\n".join(lines)


def wrapped(text: str, first: str, further: str) -> list[str]:
    """A text on as many lines as it takes, none of which cuts a name: what the first begins with, and the others."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _line(label: str, text: str) -> list[str]:
    """A finding. Further lines stand two columns to the right of the text."""
    return wrapped(text, f"  {label:<{LABEL}}", " " * (LABEL + 4))


def _lines(label: str, texts: Sequence[str]) -> list[str]:
    """Several findings, of which the first has the label."""
    lines: list[str] = []
    for text in texts:
        lines += _line(label, text)
        label = ""
    return lines


def _describe_units(units: Units) -> list[str]:
    texts = []
    for alike in by_pattern(units.blocks):
        name = alike[0]
        if len(alike) > 1:
            name += f" … {alike[-1]}"
        texts.append(f"{name}: repeated blocks")
    if units.large:
        listed = ", ".join(units.large)
        texts.append(f"{listed}: large")
    if not texts:
        texts.append("the model as one: it has no repeated blocks, and no large module")
    for pattern, why in units.root.items():
        texts.append(f"{pattern} goes with the root: {why}")
    if units.batch_norms:
        count = len(units.batch_norms)
        texts.append(f"{count} batch norms see the other samples: over the batch of all ranks")
    if units.own_batch_norms:
        path = units.own_batch_norms[0]
        texts.append(f"{path} and others, with a forward of their own, normalize over each rank's part of it")
    return _lines("FSDP units", texts)


def _describe_tensor(plan: TensorPlan) -> list[str]:
    texts = []
    for alike in groups_by_pattern(plan.groups):
        # One text for groups that differ only in numbers, such as a layer's.
        text = group_reason(alike[0], len(alike), plan.n_ranks)
        texts.append(text)
    texts += map(attention_reason, by_pattern(plan.attentions))
    if not texts:
        texts.append("none: no two layers pair, channel by channel or head by head")
    lines = _lines("columns→rows", texts)
    refused_groups = groups_by_pattern(plan.refused)
    for alike in refused_groups[:MOST_REASONS]:
        group = alike[0]
        lines += _line("  refused", f"{group_name(group)}: {group.refused}")
    replicated = list(plan.replicated.items())
    for pattern, why in replicated[:MOST_REASONS]:
        lines += _line("  replicated", f"{pattern}: {why}")
    n_more = len(replicated) - MOST_REASONS
    if n_more > 0:
        lines += _line("", f"… and {n_more} more")
    return lines
