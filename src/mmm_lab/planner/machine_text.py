"""A machine as text: each value with its source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mmm_launch.machines.machine import Machine

NAMES = [field.name for field in fields(Machine)]
# Fields that predictions use, in the order of `Machine`.
RATES = NAMES[NAMES.index("accelerator") : NAMES.index("sources")]
# Fields that launch uses.
BY_LAUNCH = [
    *("match", "scheduler", "queues", "cpus_per_host"),
    *NAMES[NAMES.index("mpi") : NAMES.index("env")],
    "advice",
]


def assumed(machine: Machine) -> list[str]:
    """A line for each value that predictions use."""
    names = ("device", "hosts", "ranks_per_host", *RATES)
    return [_row(machine, name, "assumed") for name in names if getattr(machine, name)]


def settings(machine: Machine) -> list[str]:
    """A line for each field and environment variable that launch uses."""
    rows = [_row(machine, name, machine.source) for name in BY_LAUNCH if getattr(machine, name)]
    for name, (value, source) in machine.variables().items():
        rows.append(f"{name:<22} {value:<14} {source}".rstrip())
    return rows


def _row(machine: Machine, name: str, source: str) -> str:
    """A field with its value and its source. `source` is used where the machine's file does not name one."""
    return f"{name:<22} {_text(getattr(machine, name)):<14} {machine.sources.get(name, source)}".rstrip()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        # Items with spaces need a comma between them.
        separator = ", " if " " in str(value[0]) else " "
        return separator.join(map(str, value))
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
