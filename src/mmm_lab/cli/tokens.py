"""``mmm tokens FILES… -o DIR``: prepare a file of tokens, in parallel; called again, it resumes where it was killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mmm.errors import ConfigError
from mmm.units import counted
from mmm_lab.cli.parser import Parser, count
from mmm_launch.contract import usable_cores

EPILOG = """\
DIR gets tokens.bin (unsigned integers without a header), documents.bin (where each document ends), the tokenizer's file
and manifest.json. Until all is done, it is called DIR.part.

examples:
  mmm tokens *.txt -o words --train-bpe 8000
  mmm tokens reviews.jsonl -o words --field text --tokenizer tokenizer.json
  launch python3 -m mmm.trainer.lm --text words
exit codes: 0 prepared, 2 wrong arguments, or files that cannot be read
"""


def main(argv: list[str]) -> int:
    """Prepare the folder and say what is in it. Returns 0. Raises UserError for what cannot be read or does not fit."""
    parser = Parser(
        prog="mmm tokens",
        description="Prepare a file of tokens from text, in parallel. Called again, it resumes where it was killed.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        type=Path,
        help="text: each file is a document; JSON lines (.jsonl, .ndjson, .json): each line",
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", type=Path, help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        metavar="bytes|chars|PATH",
        help="bytes (the default), the characters of the files, a tokenizer.json, or a SentencePiece .model",
    )
    parser.add_argument("--train-bpe", metavar="N", type=int, help="train a byte-level BPE of N tokens on the files")
    parser.add_argument(
        "--separator",
        default="",
        metavar="TEXT",
        help=r"what stands between the documents of a file; \n is a line's end",
    )
    parser.add_argument(
        "--eos", metavar="TOKEN", help="token to put at the end of each document; with --train-bpe <|endoftext|>"
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        default="text",
        help="the field of JSON lines that has the text (default: text); '' takes all of a line",
    )
    parser.add_argument(
        "--processes", metavar="N", type=count, help="default: one for each core that this process may use"
    )
    args = parser.parse_args(argv)
    # What contradicts each other is refused before the files are read: that may take hours.
    if args.train_bpe is not None and args.tokenizer is not None:
        raise ConfigError("--train-bpe and --tokenizer contradict each other: leave one out")
    if args.train_bpe is not None and args.eos is not None:
        raise ConfigError("--train-bpe and --eos contradict each other: a trained tokenizer has <|endoftext|>")
    processes = args.processes or usable_cores()

    from mmm.data.text.prepare import Preparation, prepare  # imports NumPy

    # A shell gives the two characters \n.
    separator = args.separator.replace("\\n", "\n")
    tokenizer = args.tokenizer or "bytes"
    wanted = Preparation(tuple(args.files), args.out, tokenizer, args.train_bpe, separator, args.eos, args.field)
    began = time.monotonic()
    about = prepare(wanted, processes, lambda line: print(line, file=sys.stderr))
    kind = about["tokenizer"]["kind"]
    vocab_size = about["tokenizer"]["vocab_size"]
    documents = counted(about["documents"], "document")
    workers = counted(processes, "process", "processes")
    print(
        f"{args.out}: {about['tokens']} tokens ({kind}, vocabulary {vocab_size}), {documents}, "
        f"{about['bytes']} bytes of text; {time.monotonic() - began:.1f} s with {workers}"
    )
    return 0
