"""What was found, in words: each finding in a line or two, with its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mmm_verify.propose.cuts import Cuts, ranges
from mmm_verify.propose.tensor import TensorPlan
from mmm_verify.propose.trace import pattern_of
from mmm_verify.propose.trial import Group
from mmm_verify.propose.units import Units

WIDTH = 100
LABEL = 14  # columns of what a line is about
MOST_REASONS = 6


def groups_by_pattern(groups: Sequence[Group]) -> dict[tuple[object, ...], list[Group]]:
    """Groups that are alike but for the numbers in their paths."""
    alike: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        key = (
            *(
                (pattern_of(path), sections if len(sections) > 1 and not group.refused else 1)
                for path, sections in group.producers.items()
            ),
            *(pattern_of(path) for path in group.consumers),
            *((pattern_of(path), name) for path, name in group.fixes),
            *(pattern_of(path) for path in group.between),
            group.refused and pattern_of(group.around),
        )
        alike.setdefault(key, []).append(group)
    return alike


def group_name(group: Group) -> str:
    """``layers.*.attention: wq, wk, wv → wo``."""
    around = group.around
    prefix = f"{around}." if around else ""

    def short(paths: Sequence[str]) -> str:
        return ", ".join(path.removeprefix(prefix) for path in paths)

    name = f"{pattern_of(around)}: " if around else ""
    return f"{name}{short(list(group.producers))} → {short(group.consumers)}"


def group_reason(group: Group, count: int, parts: int) -> str:
    """A group with what a reader has to know of it."""
    words = [f"{group_name(group)}{f' ({count} times)' if count > 1 else ''}"]
    for path, sections in group.producers.items():
        own = path.rpartition(".")[2]
        shared = [width for width, pieces in sections if pieces == 1]
        if len(sections) > 1:
            widths = ", ".join(str(width) for width, _ in sections)
            words.append(f"{own} is fused of {widths} channels, and a rank needs a part of each")
        if shared:
            words.append(f"all ranks need the same {' and '.join(map(str, shared))} channels of {own}")
    for path in group.between:
        words.append(f"{path.rpartition('.')[2]} sees a rank's heads or channels alone: its gradients are partial")
    if group.fixes:
        names = " and ".join(dict.fromkeys(name for _, name in group.fixes))
        words.append(f"its forward counts by {names}: divided by {parts}")
    return "; ".join(words)


def describe(units: Units | None, plan: TensorPlan | None, cuts: Cuts) -> str:
    """All findings, 100 columns wide."""
    lines = ["found"]
    if units is not None:
        lines += _describe_units(units)
    if plan is not None:
        lines += _describe_tensor(plan)
    lines += _describe_cuts(cuts)
    return "\n".join(lines)


def _line(label: str, text: str) -> list[str]:
    first = f"  {label:<{LABEL}}"
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * (LABEL + 4), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _describe_units(units: Units) -> list[str]:
    texts = [f"{', '.join(ranges(units.blocks))}: repeated blocks"] if units.blocks else []
    texts += [f"{', '.join(units.large)}: large"] if units.large else []
    lines: list[str] = []
    for text in texts or ["the model as one: it has no repeated blocks, and no large module"]:
        lines += _line("" if lines else "FSDP units", text)
    for pattern, why in units.root.items():
        lines += _line("", f"{pattern} goes with the root: {why}")
    if units.batch_norms:
        count = len(units.batch_norms)
        lines += _line("", f"{count} batch norms see the other samples: over the batch of all ranks")
    if units.own_batch_norms:
        path = units.own_batch_norms[0]
        lines += _line("", f"{path} and others, with a forward of their own, normalize over each rank's part of it")
    return lines


def _describe_tensor(plan: TensorPlan) -> list[str]:
    lines: list[str] = []
    for alike in groups_by_pattern(plan.groups).values():
        lines += _line("" if lines else "columns→rows", group_reason(alike[0], len(alike), plan.parts))
    if not lines:
        lines += _line("columns→rows", "none: no matrix comes after another by channels, or heads, alone")
    for alike in list(groups_by_pattern(plan.refused).values())[:MOST_REASONS]:
        lines += _line("  refused", f"{group_name(alike[0])}: {alike[0].refused}")
    for pattern, why in list(plan.replicated.items())[:MOST_REASONS]:
        lines += _line("  replicated", f"{pattern}: {why}")
    if len(plan.replicated) > MOST_REASONS:
        lines += _line("", f"… and {len(plan.replicated) - MOST_REASONS} more")
    return lines


def _describe_cuts(cuts: Cuts) -> list[str]:
    lines: list[str] = []
    if cuts.after:
        lines += _line("stages end", f"after {', '.join(ranges(cuts.after))}: one tensor alone goes on")
    by_reason: dict[str, list[str]] = {}
    for path, why in cuts.refused.items():
        by_reason.setdefault(why, []).append(path)
    for why, paths in by_reason.items():
        lines += _line("" if lines else "stages end", f"not after {', '.join(ranges(paths))}: {why}")
    if not lines:
        lines += _line("stages end", "nowhere: there are no blocks one after the other")
    if cuts.shared:
        lines += _line("", f"both sides need {', '.join(cuts.shared[:3])}: tied, and to be kept equal")
    return lines
