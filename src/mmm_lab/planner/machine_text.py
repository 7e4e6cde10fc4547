"""A known machine in text: each value with its source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mmm_launch.machines.machine import Machine

NAMES = [field.name for field in fields(Machine)]
RATES = NAMES[NAMES.index("accelerator") : NAMES.index("sources")]
BY_LAUNCH = [
    *("match", "scheduler", "queues", "cpus_per_host"),
    *NAMES[NAMES.index("mpi") : NAMES.index("env")],
    "advice",
]


def assumed(machine: Machine) -> list[str]:
    """A line for each number that a prediction counts with."""
    names = ("device", "hosts", "ranks_per_host", *RATES)
    return [_row(machine, name, "assumed") for name in names if getattr(machine, name)]


def settings(machine: Machine) -> list[str]:
    """A line for each field and variable that launch goes by."""
    rows = [_row(machine, name, machine.source) for name in BY_LAUNCH if getattr(machine, name)]
    for name, (value, source) in machine.variables().items():
        rows.append(f"{name:<22} {value:<14} {source}".rstrip())
    return rows


def _row(machine: Machine, name: str, source: str) -> str:
    return f"{name:<22} {_text(getattr(machine, name)):<14} {machine.sources.get(name, source)}".rstrip()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        between = ", " if " " in str(value[0]) else " "
        return between.join(map(str, value))
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
