"""``mmm import DIR -o CKPT``: weights of a language model as a checkpoint of this package."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mmm.units import counted
from mmm_lab.cli.parser import Parser

EPILOG = """\
A run can start from CKPT, and text can be sampled from it.

examples:
  mmm import smollm2-hf -o smollm2
  launch python3 -m mmm.trainer.lm --init_from smollm2 --text FILES…
  mmm sample smollm2 --prompt "Once upon a time"
exit codes: 0 written, 2 wrong arguments, or weights that cannot be read or are of another kind of model
"""


def main(argv: list[str]) -> int:
    """Import, and say what it is. Returns 0. Raises UserError for what cannot be read or is another kind of model."""
    parser = Parser(
        prog="mmm import",
        description="Write the weights of a language model as a checkpoint of this package.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "weights",
        metavar="DIR",
        type=Path,
        help="a folder with config.json and *.safetensors, as on Hugging Face",
    )
    parser.add_argument("-o", "--out", required=True, metavar="CKPT", type=Path, help="the folder to make")
    args = parser.parse_args(argv)
    from mmm.generate import tokenizer_on_disk
    from mmm.weights.open_weights import open_weights
    from mmm.weights.own import write_own  # imports torch
    from mmm.weights.weights import config_of

    began = time.monotonic()
    weights = open_weights(args.weights)
    # Both refuse what they cannot read before a file is written.
    config = config_of(weights)
    tokenizer = tokenizer_on_disk(weights.metadata)
    write_own(weights, args.out)
    # What the files have and this package passes over.
    for note in weights.metadata.notes:
        print(f"{args.weights}: {note}", file=sys.stderr)
    elements = sum(entry.elements for entry in weights.entries.values())
    print(
        f"{args.out}: {elements:,} parameters, {counted(config.n_layers, 'layer')}, dim {config.dim}, vocabulary "
        f"{config.vocab_size}; tokenizer: {tokenizer or 'none'}; {time.monotonic() - began:.1f} s"
    )
    return 0
