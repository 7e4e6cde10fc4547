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
    return _rows(machine, ["device", "hosts", "ranks_per_host", *RATES], "assumed")


def settings(machine: Machine) -> list[str]:
    """A line for each field, environment variable and fault that launch uses."""
    rows = _rows(machine, BY_LAUNCH, machine.source)
    rows += [_row(name, value, source) for name, (value, source) in machine.variables().items()]
    rows += [_row(name, fault, machine.source_of(name)) for name, fault in machine.faults.items()]
    return rows


def _rows(machine: Machine, names: list[str], default: str) -> list[str]:
    """A line for each of some fields that have a value. `default` is the source where the file does not name one."""
    rows = []
    for name in names:
        value = getattr(machine, name)
        if value:
            rows.append(_row(name, value, machine.sources.get(name, default)))
    return rows


def _row(name: str, value: Any, source: str) -> str:
    return f"{name:<22} {_text(value):<14} {source}".rstrip()


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
