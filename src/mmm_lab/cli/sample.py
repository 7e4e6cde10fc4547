"""``mmm sample CKPT --prompt TEXT``: text from a language model, on one device or sharded over ranks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mmm.errors import UserError
from mmm_lab.cli.parser import Parser, count

N_LIKELIEST = 5  # tokens of --show
USUAL_BLOCK = 2048  # tokens, where the weights do not say
EPILOG = """\
CKPT is a checkpoint or a folder of a run of mmm.trainer.lm, a checkpoint of mmm import, or a folder of safetensors.
On several ranks the tokens are the same, in float64.

examples:
  mmm sample runs/a --prompt "ROMEO:"
  mmm sample smollm2 --prompt "The capital of France is" --temperature 0 --max-new-tokens 12
  launch -n 3 python3 -m mmm_lab.cli.main sample CKPT --prompt TEXT --tp 3
exit codes: 0 written, 2 wrong arguments, or weights that cannot be read
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mmm sample",
        description="Write text from a language model, on one device or sharded over ranks.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("weights", metavar="CKPT", type=Path, help="the model's weights")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add(
        "--max-new-tokens",
        metavar="N",
        type=count,
        default=200,
        help="tokens to write, unless the text ends (default: 200)",
    )
    add(
        "--temperature",
        metavar="X",
        type=float,
        default=1.0,
        help="divides the logits; 0: the likeliest token (default: 1)",
    )
    add("--top-k", metavar="N", type=int, help="draw only from the N likeliest tokens (default: from all)")
    add(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="only from the likeliest, of probability P together (default: 1)",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="random seed (default: 0)",
    )
    add(
        "--tp",
        metavar="N",
        type=count,
        default=1,
        help="ranks that each matrix is sharded over (default: 1)",
    )
    add(
        "--pp",
        metavar="N",
        type=count,
        default=1,
        help="ranks that the layers are split over (default: 1)",
    )
    add("--block", metavar="N", type=count, help="tokens that the model sees at once (default: the most it knows)")
    add(
        "--timeout",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds that a collective may take (default: 600)",
    )
    add("--chat", action="store_true", help="the prompt is a message, by the model's chat template")
    add("--show", action="store_true", help="at each step, the five likeliest tokens as bars")
    add("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp64"], help="default: auto, by the device")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "xpu", "mps"], help="default: auto")
    return parser


def main(argv: list[str]) -> int:
    """Write a prompt and what follows to stdout. Returns 0. Raises UserError for what does not fit."""
    args = _parser().parse_args(argv)

    from mmm.runtime.failure import report_user_error
    from mmm.runtime.ranks import whoami

    try:
        _sample(args)
    except UserError as error:
        if whoami().world_size == 1:
            raise
        # Said once, and not by each rank.
        report_user_error(error)
        return 2
    return 0


def _sample(args: argparse.Namespace) -> None:
    from mmm.generate import (
        chat_prompt,
        check_block,
        checked,
        encode_prompt,
        end_of_answers,
        evaluation_model,
        load_weights,
        sample_text,
        tokenizer_on_disk,
    )
    from mmm.layout import Layout
    from mmm.nn.sampling import Sampling
    from mmm.run.options import RunFlags
    from mmm.runtime.device import choose_device, choose_precision, full_float32
    from mmm.runtime.process_group import locate, process_group
    from mmm.runtime.ranks import whoami
    from mmm.weights.open_weights import open_weights  # imports torch
    from mmm.weights.weights import config_of
    from mmm_lab.cli.written_text import TextWriter

    # What is wrong is refused before the ranks meet.
    RunFlags(timeout=args.timeout, seed=args.seed).check()
    sampling = checked(Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed))
    rank = whoami()
    layout = Layout(tp=args.tp, pp=args.pp).fit(rank.world_size)
    # Opened, not read: each rank reads its own shards below.
    weights = open_weights(args.weights)
    metadata = weights.metadata
    config = config_of(weights)
    tokenizer = tokenizer_on_disk(metadata)
    block = args.block or metadata.block or USUAL_BLOCK
    check_block(config, block)
    text = args.prompt
    # Tokens that begin a text, and those that end one.
    bos = metadata.bos
    ends = metadata.eos
    if args.chat:
        # The template begins the text by itself.
        text = chat_prompt(args.prompt, tokenizer)
        bos = ()
        ends = (*ends, *end_of_answers(tokenizer))
    prompt = encode_prompt(text, tokenizer, block, config.vocab_size, bos)
    assert tokenizer is not None
    rank = locate(rank, args.timeout)
    device = choose_device(args.device, rank)
    precision = choose_precision(args.dtype, device)
    with process_group(rank, device, args.timeout), full_float32(precision):
        model = evaluation_model(config, layout, precision, device, args.timeout)
        load_weights(rank, model, weights)
        began = time.monotonic()
        # All ranks draw the same tokens; rank 0 writes them.
        writer = None
        on_token = None
        if rank.is_main:
            writer = TextWriter(tokenizer, ends, bars=args.show)
            writer.begin(prompt[len(bos) :], is_shown=not args.chat)
            on_token = writer.add
        _, n_tokens = sample_text(
            model,
            prompt,
            tokenizer,
            args.max_new_tokens,
            sampling,
            block,
            config.vocab_size,
            ends,
            bos,
            N_LIKELIEST if args.show else 0,
            on_token,
        )
        if writer is not None:
            writer.end()
            seconds = time.monotonic() - began
            for line in (*metadata.notes, f"{n_tokens} tokens in {seconds:.1f} s on {layout}, {precision.name}"):
                print(line, file=sys.stderr)
