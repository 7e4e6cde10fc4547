"""What docs/guide/planner.md counts with: models, machines and colours, as a script of the page.

The formulas stand beside it; `tests/docs/test_in_a_browser.py` holds them and it to this package.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import Any

from mmm import palette
from mmm.models.llama.model import PRESETS
from mmm_lab.cli.plan import SIZES
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.network import peak_rate
from mmm_lab.planner.spec import ModelSpec
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine, read

EXPERTS = {"n_experts": 8, "top_k": 2}  # a model each layer of which is as wide, eight times: llama-8b's is Mixtral's
WITH_EXPERTS = ("small", "llama-8b")
RATES = (
    "ranks_per_host",
    "gpu_memory",
    "memory_bandwidth",
    "link_bandwidth",
    "link_latency",
    "network_bandwidth",
    "network_latency",
    "matmul_efficiency",
    "memory_efficiency",
    "link_efficiency",
    "network_efficiency",
    "overlap",
    "layer_overhead",
)
SAMPLES = (1024, 2048)  # lengths by which FLOPs a token are read


def model_data(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """A Transformer. flops: of each kind of part, of the forward of a token, attention's scores left out."""
    specs = [read_model(name, dict.fromkeys(SIZES) | sizes, length) for length in SAMPLES]
    by_length = [_flops_of_token(spec) for spec in specs]
    assert by_length[0] == by_length[1], "FLOPs of a token depend on the length of its sequence"
    spec, config = specs[0], specs[0].config
    named = [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return {
        "command": shlex.join(["--model", name, *named]),
        "flags": shlex.join(spec.flags),
        "n_layers": config.n_layers,
        "dim": config.dim,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_dim": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "n_experts": config.n_experts,
        "top_k": config.top_k if config.n_experts else 0,
        "expert_hidden_dim": config.expert_hidden_dim if config.n_experts else 0,
        "tied": spec.tied,
        "parameters": spec.parameters,
        "kinds": [
            {
                "role": kind.role,
                "flops": flops,
                "matrices": [{"shape": m.shape, "dim": m.dim, "expert": m.expert} for m in kind.matrices],
            }
            for kind, flops in zip(spec.kinds, by_length[0], strict=True)
        ],
    }


def _flops_of_token(spec: ModelSpec) -> list[int]:
    flops = [divmod(kind.flops - kind.attention_flops, spec.seq_length) for kind in spec.kinds]
    assert not any(rest for _, rest in flops), "tokens of a sample differ"
    return [each for each, _ in flops]


def machine_data(machine: Machine) -> dict[str, Any]:
    """Of accelerators alone: what is left out here the formulas of the page leave out."""
    rates = {name: getattr(machine, name) for name in RATES}
    return {
        "hosts": machine.hosts,
        "device": machine.device,
        "scheduler": machine.scheduler,
        **rates,
        "budget_part": 1 - machine.memory_reserve,
        "peak": peak_rate(machine, "bf16"),
    }


@cache
def data() -> dict[str, Any]:
    """All of it."""
    # The page's formulas know no sliding window.
    models = {name: model_data(name, {}) for name, sizes in PRESETS.items() if sizes.window is None}
    models |= {f"{name} with {EXPERTS['n_experts']} experts": model_data(name, EXPERTS) for name in WITH_EXPERTS}
    machines = {
        machine.name.lower(): machine_data(machine)
        for machine in map(read, sorted(find.BUILT_IN.glob("*.json")))
        if machine.device != "cpu" and machine.gpu_memory and machine.memory_bandwidth
    }
    colors = {"memory": palette.MEMORY, "axes": palette.AXES, "parts": palette.STEP_PARTS}
    themes = {name: theme._asdict() for name, theme in palette.THEMES.items()}
    return {"models": models, "machines": machines, "colors": colors, "themes": themes}


def script() -> str:
    """The text of the script: a line a model, a machine."""
    lines = ["const PLANNER_DATA = {"]
    for group, entries in data().items():
        lines.append(f"  {group}: {{")
        lines += [f"    {json.dumps(name)}: {json.dumps(entry)}," for name, entry in entries.items()]
        lines.append("  },")
    return "\n".join([*lines, "};", ""])
