"""What attention over packed documents costs on a CPU: each document by itself, and all at once with a mask.

    python benchmarks/documents.py [--seq_length 8192] [--lengths 512 8192] [--dim 128] [--layers 2] [--pairs 3]

A forward and a backward of a Llama on one sequence, which is full of documents of one length. Each is run in a process
of its own, with and without a mask in turn. Printed are medians: CPU-seconds of the second of two passes, and how far
the memory of the process has grown at its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median
from unittest.mock import patch

import torch

from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.nn.attention import Documents

VOCABULARY = 256


def measure(args: argparse.Namespace, length: int, masked: bool) -> tuple[float, float]:
    """CPU-seconds of a pass, and MiB."""
    torch.manual_seed(0)
    seq = args.seq_length
    config = TransformerConfig(
        dim=args.dim,
        n_layers=args.layers,
        n_heads=args.dim // 32,
        n_kv_heads=args.dim // 32,
        vocab_size=VOCABULARY,
    )
    model = Transformer(config)
    places = torch.arange(seq)
    documents = Documents.of((places - places % length)[None])
    tokens = torch.randint(VOCABULARY, (1, seq))
    before = peak_memory()
    # Compiled code makes the mask.
    with patch.object(torch.compiler, "is_compiling", lambda: masked):
        for _ in range(2):
            began = time.process_time()
            model(tokens, documents=documents).sum().backward()
            seconds = time.process_time() - began
    return seconds, peak_memory() - before


def peak_memory() -> float:
    """The most MiB that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(length: int, masked: bool) -> tuple[float, float]:
    """`measure`, by this program once more."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(length), str(int(masked))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, grown = json.loads(done.stdout)
    return seconds, grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq_length", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        length, masked = args.measure
        print(json.dumps(measure(args, length, bool(masked))))
        return
    print(f"{'documents of':>12} {'':>10} {'CPU-seconds':>12} {'MiB more':>9}")
    for length in args.lengths:
        results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(args.pairs):
            for masked in results:
                results[masked].append(in_a_process(length, masked))
        for masked, pairs in results.items():
            seconds = median(seconds for seconds, _ in pairs)
            grown = median(grown for _, grown in pairs)
            name = "mask" if masked else "no mask"
            print(f"{length:12,} {name:>10} {seconds:12.3f} {grown:9,.0f}")


if __name__ == "__main__":
    main()
