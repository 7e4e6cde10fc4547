"""``mmm sample CKPT --prompt TEXT``: text from a language model, on one device or sharded over ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mmm.errors import UserError
from mmm_lab.cli.parser import Parser

SHOWN = 5  # tokens, of --show
EPILOG = """\
CKPT is a checkpoint or a folder of a run of mmm.trainer.lm, a checkpoint of mmm import, or a folder of safetensors.
On several ranks, whose tokens are the same in float64:
  launch -n 3 python3 -m mmm_lab.cli.main sample CKPT --prompt TEXT --tp 3
"""


def main(argv: list[str]) -> int:
    """Write a prompt and what follows to stdout. Returns 0. Raises UserError for what does not fit."""
    parser = Parser(prog="mmm sample", description=__doc__, epilog=EPILOG)
    parser.add_argument("weights", metavar="CKPT", type=Path)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    for name, kind, default, about in (
        ("max-new-tokens", int, 200, "tokens to write, unless the text ends before"),
        ("temperature", float, 1.0, "divides the logits; 0: always the most probable token"),
        ("top-k", int, None, "only among so many of the most probable tokens (all)"),
        ("top-p", float, 1.0, "only among the most probable tokens with this probability together"),
        ("seed", int, 0, "another one: another text"),
        ("tp", int, 1, "ranks that each matrix is sharded over"),
        ("pp", int, 1, "ranks that the layers are split over"),
        ("block", int, None, "tokens that the model sees at once (as in training)"),
        ("timeout", float, 600.0, "seconds that a collective may take"),
    ):
        text = about if default is None else f"{about} ({default})"
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*flags, type=kind, default=default, metavar="N", help=text)
    parser.add_argument("--chat", action="store_true", help="the prompt is a message, by the model's chat template")
    parser.add_argument("--show", action="store_true", help="at each step, the five likeliest tokens as bars")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp64"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "xpu", "mps"])
    args = parser.parse_args(argv)

    from mmm.runtime.failure import report_user_error
    from mmm.runtime.ranks import whoami

    try:
        _sample(args)
    except UserError as error:
        if whoami().world_size == 1:
            raise
        report_user_error(error)
        return 2
    return 0


def _sample(args: Any) -> None:
    from mmm.errors import ConfigError
    from mmm.generate import (
        chat_prompt,
        check_block,
        checked,
        config_of,
        encode_prompt,
        end_of_answers,
        evaluation_model,
        load_weights,
        sample_text,
        tokenizer_on_disk,
    )
    from mmm.layout import Layout
    from mmm.nn.sampling import Sampling
    from mmm.run.options import Run
    from mmm.runtime.device import choose_device, choose_precision, full_float32
    from mmm.runtime.process_group import locate, process_group
    from mmm.runtime.ranks import whoami
    from mmm.weights.open_weights import open_weights  # imports torch
    from mmm_lab.cli.written_text import TextWriter

    for name, least in (("max_new_tokens", 1), ("tp", 1), ("pp", 1), ("block", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"--{name} {value}: it must be at least {least}")
    Run(timeout=args.timeout, seed=args.seed).check()
    sampling = checked(Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed))
    rank = whoami()
    layout = Layout(tp=args.tp, pp=args.pp).fit(rank.world_size)
    weights = open_weights(args.weights)
    config, tokenizer = config_of(weights), tokenizer_on_disk(weights.metadata)
    metadata = weights.metadata
    block = args.block or metadata.block or 2048
    check_block(config, block)
    text, bos, ends = args.prompt, metadata.bos, metadata.eos
    if args.chat:
        text, bos = chat_prompt(args.prompt, tokenizer), ()
        ends = (*metadata.eos, *end_of_answers(tokenizer))
    prompt = encode_prompt(text, tokenizer, block, config.vocab_size, bos)
    assert tokenizer is not None
    rank = locate(rank, args.timeout)
    device = choose_device(args.device, rank)
    precision = choose_precision(args.dtype, device)
    with process_group(rank, device, args.timeout), full_float32(precision):
        model = evaluation_model(config, layout, precision, device, args.timeout)
        load_weights(rank, model, weights)
        began, vocabulary, most = time.monotonic(), config.vocab_size, args.max_new_tokens
        writer = TextWriter(tokenizer, ends, bars=args.show) if rank.is_main else None
        if writer is not None:
            writer.begin(prompt[len(bos) :], is_part=not args.chat)
        shown = SHOWN if args.show else 0, None if writer is None else writer.add
        _, many = sample_text(model, prompt, tokenizer, most, sampling, block, vocabulary, ends, bos, *shown)
        if writer is not None:
            writer.end()
            seconds = time.monotonic() - began
            for line in (*metadata.notes, f"{many} tokens in {seconds:.1f} s on {layout}, {precision.name}"):
                print(line, file=sys.stderr)
