"""Where bits leak: operators whose results change in the last bits when one call is split into several.

    python benchmarks/where_bits_leak.py

A row is an operator and how its call is split. A cell is the share of the results that then have other bits, and 0 if
all have the same. The figures are those of this machine's CPU and of this version of PyTorch.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}
# (rows, K, columns) of a matrix product: rows × K times K × columns.
SIZES = ((64, 64, 64), (256, 256, 704))


def products(rows: int, width: int, columns: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A linear layer in one call and in several, split along each of its three sizes."""
    x = torch.randn(rows, width)
    weight = torch.randn(columns, width)
    in_one = F.linear(x, weight)
    by_rows = [F.linear(piece, weight) for piece in x.chunk(8)]
    by_columns = [F.linear(x, piece) for piece in weight.chunk(8)]
    # Halves of the inner size K: each product is a summand of the result.
    summands = []
    for x_half, weight_half in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True):
        summands.append(F.linear(x_half.contiguous(), weight_half.contiguous()))
    size = f"matmul {rows}×{width}·{width}×{columns}"
    return {
        f"{size}, rows in 8": (in_one, torch.cat(by_rows)),
        f"{size}, columns in 8": (in_one, torch.cat(by_columns, 1)),
        f"{size}, K in 2": (in_one, sum(summands[1:], summands[0])),
    }


def others() -> dict[str, tuple[Tensor, Tensor]]:
    """Attention, a norm, an activation and a sum, in one call and in several."""
    # (batch, heads, seq, head_dim) each
    q, k, v = torch.randn(3, 4, 8, 64, 16).unbind()
    by_heads = []
    for q_heads, k_heads, v_heads in zip(q.chunk(4, 1), k.chunk(4, 1), v.chunk(4, 1), strict=True):
        two_heads = (q_heads.contiguous(), k_heads.contiguous(), v_heads.contiguous())
        by_heads.append(F.scaled_dot_product_attention(*two_heads, is_causal=True))
    x = torch.randn(4, 64, 96)
    weight = torch.randn(96)
    by_tokens = [F.rms_norm(tokens, (96,), weight) for tokens in x.chunk(4, 1)]
    # 37 is no multiple of a vector register, so each piece has a tail.
    pieces = [F.silu(piece.clone()) for piece in x.flatten().split(37)]
    halves = x.chunk(2, -1)
    return {
        "attention, 8 heads in 4": (
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            torch.cat(by_heads, 1),
        ),
        "RMSNorm, 64 tokens in 4": (F.rms_norm(x, (96,), weight), torch.cat(by_tokens, 1)),
        "SiLU of 24,576 numbers, in pieces of 37": (F.silu(x).flatten(), torch.cat(pieces)),
        "sums of 96 numbers, in 2": (x.sum(-1), halves[0].sum(-1) + halves[1].sum(-1)),
    }


def updated(sizes: list[int], values: Tensor, gradients: Tensor, **kernel: bool) -> Tensor:
    """Three steps of AdamW on shards of these sizes, put together again."""
    parameters = [nn.Parameter(shard.clone()) for shard in values.split(sizes)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, **kernel)
    for _ in range(3):
        for parameter, gradient in zip(parameters, gradients.split(sizes), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def optimizers() -> dict[str, tuple[Tensor, Tensor]]:
    """AdamW on one tensor of 11,100 elements, and on 300 shards of it, by both kernels."""
    size = 37 * 300
    values = torch.randn(size)
    gradients = torch.randn(size)
    # 37 is 32 + 5: five elements of each shard are not updated by vector instructions.
    shards = [37] * 300
    pairs = {}
    for kernel in ("foreach", "fused"):
        in_one = updated([size], values, gradients, **{kernel: True})
        split = updated(shards, values, gradients, **{kernel: True})
        pairs[f"AdamW {kernel}, 11,100 numbers in 300 shards"] = (in_one, split)
    return pairs


def share(in_one: Tensor, split: Tensor) -> str:
    """The share of elements that differ, as a cell of the table."""
    differs = (in_one != split).double().mean().item()
    if differs == 0:
        return "0"
    return f"{100 * differs:.2g} %"


def main() -> None:
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for dtype in DTYPES.values():
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        pairs = {}
        for size in SIZES:
            pairs |= products(*size)
        pairs |= others()
        pairs |= optimizers()
        for name, (in_one, split) in pairs.items():
            rows.setdefault(name, []).append(share(in_one, split))
    torch.set_default_dtype(torch.float32)
    instructions = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {platform.machine()}, {instructions}, one thread")
    print_row("", list(DTYPES))
    for name, cells in rows.items():
        print_row(name, cells)


def print_row(name: str, cells: list[str]) -> None:
    print(f"{name:44}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    main()
