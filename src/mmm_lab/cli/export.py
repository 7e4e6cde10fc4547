"""``mmm export CKPT -o DIR``: a language model's weights as `transformers` loads them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mmm.errors import CheckpointError, ConfigError
from mmm.units import counted
from mmm_lab.cli.parser import Parser

EPILOG = """\
DIR gets config.json, model.safetensors (or several, with an index), and the tokenizer's file:
  transformers.AutoModelForCausalLM.from_pretrained("DIR")

examples:
  mmm export runs/a/checkpoints/step-500 -o for-transformers --dtype bf16
  mmm export runs/lora -o merged                 a run with --lora: W + scale · B A, a model like any other
  mmm export runs/lora -o adapter --adapter      only A and B: peft.PeftModel.from_pretrained(base, "adapter")
exit codes: 0 written, 2 wrong arguments, or weights that cannot be read or written
"""


def main(argv: list[str]) -> int:
    """Export, and say what is in the folder. Returns 0. Raises UserError for what cannot be read or written."""
    parser = Parser(
        prog="mmm export",
        description="Write a language model's weights as `transformers` loads them.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "weights", metavar="CKPT", type=Path, help="checkpoints/step-N of a run of mmm.trainer.lm, or the run's folder"
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64"], help="default: that of the checkpoint")
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with --lora: only its small matrices, in PEFT's format"
    )
    parser.add_argument(
        "--shard-gb", metavar="GB", type=float, default=5.0, help="size of a file, at most (default: 5)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.shard_gb < float("inf"):
        raise ConfigError(f"--shard-gb {args.shard_gb}: it must be above 0, and finite")

    import torch

    from mmm.weights.hugging_face import export
    from mmm.weights.open_weights import open_weights
    from mmm.weights.peft import export_adapter

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    began = time.monotonic()
    weights = open_weights(args.weights)
    # What `transformers` has no model for is refused before a file is written.
    problem = weights.check()
    if problem:
        raise CheckpointError(problem)
    dtype = dtypes.get(args.dtype)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if args.adapter:
        export_adapter(weights, args.out, dtype, say)
    else:
        # Not GiB: as `transformers` counts.
        shard_bytes = int(args.shard_gb * 1e9)
        export(weights, args.out, dtype, shard_bytes, say)
    total_bytes = sum(path.stat().st_size for path in args.out.iterdir())
    files = counted(len(list(args.out.glob("*.safetensors"))), "file")
    size = f"{total_bytes / 1e6:,.1f} MB" if total_bytes >= 1e6 else f"{total_bytes / 1e3:,.1f} kB"
    print(f"{args.out}: {size}, {files} of tensors; {time.monotonic() - began:.1f} s")
    return 0
