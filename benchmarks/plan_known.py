"""Published training rates beside what `mmm plan` predicts for the same model, machine and layout.

    python benchmarks/plan_known.py

A row marked * trained in float8, compiled or with asynchronous tensor parallelism, which this package does not do:
what is predicted is bfloat16 without them. ``place``: of the published layout among those of its kind (the same axes
and data-parallel technique) when the search is free to choose, by predicted step time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmm_lab.planner.candidate import kind_of
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.search import Search
from mmm_launch.machines.find import named

H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
A100 = "torchtitan, docs/performance.md"
NLG = "Smith et al., Megatron-Turing NLG 530B, 2022, section 2.4"
LLAMA2_13B = {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824, "vocab_size": 32000}
LLAMA2_70B = {"vocab_size": 32000}
LLAMA_405B = {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim": 53248}
# Its feed-forward layer has two matrices of 4 · dim; ours has three of 8/3 · dim, the same number of parameters.
MT_NLG = {
    "dim": 20480,
    "n_layers": 105,
    "n_heads": 128,
    "n_kv_heads": 128,
    "ffn_dim": 54616,
    "vocab_size": 50264,
}


@dataclass(frozen=True)
class Published:
    """A published run. tokens: a second and device. fixed: its layout and techniques (`mmm_lab.planner.search.Search`).
    machine: what differs from that of `site`."""

    name: str
    model: str
    site: str
    hosts: int
    batch: int
    tokens: float
    source: str
    fixed: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)
    seq_length: int = 8192
    machine: dict[str, float] = field(default_factory=dict)


FSDP = {"data_parallel": "fsdp", "tp": 1, "pp": 1, "cp": 1, "microbatches": 1}
SELECTIVE, FULL, NONE = ({**FSDP, "checkpointing": mode} for mode in ("selective", "full", "none"))
TP8 = {"data_parallel": "fsdp", "tp": 8, "cp": 1, "checkpointing": "full"}
NLG_FIXED = {"tp": 8, "pp": 35, "cp": 1, "checkpointing": "full", "schedule": "1F1B"}
RUNS = [
    Published("8B, FSDP 8", "llama-8b", "grand-teton", 1, 16, 5762, H100, SELECTIVE),
    Published("8B, FSDP 128", "llama-8b", "grand-teton", 16, 256, 5605, H100, SELECTIVE),
    Published("70B, FSDP 32 · TP 8 *", "llama-70b", "grand-teton", 32, 512, 829, H100, {**TP8, "pp": 1}),
    Published(
        "405B, FSDP 8 · TP 8 · PP 8, 1F1B *",
        "llama-70b",
        "grand-teton",
        64,
        256,
        100,
        H100,
        {**TP8, "pp": 8, "schedule": "1F1B"},
        LLAMA_405B,
    ),
    Published(
        "the same, interleaved *",
        "llama-70b",
        "grand-teton",
        64,
        256,
        128,
        H100,
        {**TP8, "pp": 8, "schedule": "Interleaved1F1B"},
        LLAMA_405B,
    ),
    Published("8B, FSDP 64", "llama-8b", "generic", 8, 64, 2973, A100, SELECTIVE),
    Published("70B, FSDP 64", "llama-70b", "generic", 8, 64, 331, A100, FULL),
    Published("Llama 2 13B, FSDP 64", "llama2-7b", "generic", 8, 128, 2162, A100, NONE, LLAMA2_13B, 4096),
    Published("Llama 2 13B, selective", "llama2-7b", "generic", 8, 128, 1904, A100, SELECTIVE, LLAMA2_13B, 4096),
    Published("Llama 2 70B, FSDP 64", "llama-70b", "generic", 8, 128, 353, A100, FULL, LLAMA2_70B, 4096),
    *(
        Published(
            f"530B, TP 8 · PP 35 · DP {dp}",
            "llama-70b",
            "generic",
            35 * dp,
            1920,
            1920 * 2048 / seconds / (280 * dp),
            NLG,
            {**NLG_FIXED, "dp_shard": dp},
            MT_NLG,
            2048,
        )
        for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
    ),
]


def predicted(run: Published) -> tuple[float, bool, int, str]:
    """Tokens a second and device; whether it fits; its place among layouts of its kind; the fastest of any kind."""
    spec = read_model(run.model, run.sizes, run.seq_length)
    machine = named({}, run.site).changed({"hosts": run.hosts, **run.machine})
    only = Search(spec, machine, run.batch, "bf16", fixed=run.fixed).run()
    same = min(only.kinds, key=lambda candidate: candidate.cost.seconds)
    free = Search(spec, machine, run.batch, "bf16").run()
    kind = kind_of(same.layout, same.techniques.data_parallel)
    alike = {c.layout: c for c in free.best if c.kind == kind}
    faster = [c for layout, c in alike.items() if layout != same.layout and c.cost.seconds < 0.99 * same.cost.seconds]
    own = alike.get(same.layout)
    if own is not None:
        faster = [c for c in alike.values() if c.cost.seconds < 0.99 * own.cost.seconds]
    best = str(free.fastest.layout) if free.best else "nothing fits"
    return same.tokens_per_second / machine.ranks, same.fits, len(faster) + 1, best


def main() -> None:
    heads = f"{'run':<36}{'device':<7}{'published':>10}{'predicted':>11}{'error':>7}{'fits':>6}{'place':>7}"
    print(f"{heads}   best layout of all")
    for run in RUNS:
        tokens, fits, place, best = predicted(run)
        error = tokens / run.tokens - 1
        device = "H100" if run.source == H100 else "A100"
        print(
            f"{run.name:36}{device:7}{run.tokens:10,.0f}{tokens:11,.0f}{error:7.0%}"
            f"{'yes' if fits else 'no':>6}{place:7}   {best}",
            flush=True,
        )


if __name__ == "__main__":
    main()
