"""``mmm export CKPT DIR``: a language model's weights as `transformers` loads them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mmm.errors import CheckpointError, ConfigError
from mmm.units import counted
from mmm_lab.cli.parser import Parser

EPILOG = """\
DIR has config.json, model.safetensors (or several, with an index), and the tokenizer's file:
  transformers.AutoModelForCausalLM.from_pretrained("DIR")
"""


def main(argv: list[str]) -> int:
    """Export, and say what is in the folder. Returns 0. Raises UserError for what cannot be read or written."""
    parser = Parser(prog="mmm export", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "weights", metavar="CKPT", type=Path, help="checkpoints/step-N of a run of mmm.trainer.lm, or the run's folder"
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64"], help="default: as it is")
    parser.add_argument(
        "--shard-gb", "--shard_gb", metavar="GB", type=float, default=5.0, help="of a file, at most (5)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.shard_gb < float("inf"):
        raise ConfigError(f"--shard-gb {args.shard_gb}: it must be above 0, and finite")

    import torch

    from mmm.weights.hugging_face import export
    from mmm.weights.open_weights import open_weights

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    began = time.monotonic()
    weights = open_weights(args.weights)
    if problem := weights.check():
        raise CheckpointError(problem)
    export(
        weights,
        args.folder,
        dtypes.get(args.dtype),
        int(args.shard_gb * 1e9),
        lambda line: print(line, file=sys.stderr),
    )
    size, files = (
        sum(path.stat().st_size for path in args.folder.iterdir()),
        len(list(args.folder.glob("*.safetensors"))),
    )
    print(f"{args.folder}: {size / 1e6:,.1f} MB, {counted(files, 'file')} of tensors; {time.monotonic() - began:.1f} s")
    return 0
