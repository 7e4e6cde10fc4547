"""Layers that multiply the Fourier modes of a field by matrices, as those of a Fourier neural operator.

::

    a rank's rows        FFT along columns, cut to the modes that have matrices
      │ all-to-all
      ▼
    a rank's modes       FFT along rows, the layer's own code with its matrices for these modes, inverse FFT along rows
      │ all-to-all
      ▼
    a rank's rows        inverse FFT along columns

Sources: Li et al., "Fourier neural operator for parametric partial differential equations", 2021; Grady et al.,
"Model-parallel Fourier neural operators as learned surrogates for large-scale parametric PDEs", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmm.errors import ConfigError
from mmm.parallel.cp.space.split import Split, other_values
from mmm.parallel.cp.space.strips import strips
from mmm.parallel.cp.space.take import Axis, Move
from mmm.torch_private.module import own_parameters

# Functions of `torch.fft`, as they call themselves. Complex ones have the modes to keep at both ends of the columns.
TRANSFORMS = ("fft_rfft2", "fft_rfftn")
INVERSES = ("fft_irfft2", "fft_irfftn")


def spectral(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """A module whose forward has `torch.fft.rfft2` or rfftn of its input, multiplies the first modes of columns by
    matrices, and has irfft2 or irfftn: as the layers of Fourier neural operators. Each rank does so for some modes.

    Args:
        x: (batch, channels, rows, …, columns), this rank's rows.
    """
    rows = split.row_axis(module, x)
    if rows is None:
        return forward(x)  # type: ignore[no-any-return]
    own_matrices: dict[str, Any] = {}
    for name, (matrices, dim) in matrices_of(module).items():
        modes = rows._replace(dim=x.ndim - 1, have=strips(matrices.shape[dim], len(rows.have)))
        own_matrices[name] = modes.own(matrices, dim)
    transforms = _Transforms(x, rows, modes)
    attributes: Any = own_parameters(module)
    with other_values(attributes, own_matrices), transforms:
        return forward(transforms.stand_in)  # type: ignore[no-any-return]


def matrices_of(module: Any) -> dict[str, tuple[Tensor, int]]:
    """The matrices that a module has for modes, by name, and which dim of each is the modes of columns.

    They are its complex parameters (in, out, …, modes of columns), or pairs of real numbers (in, out, …, modes of
    columns, 2).
    """
    matrices = {}
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim > 3:
            dim = -1 if weight.is_complex() else -2
            matrices[name] = (weight, dim)
    return matrices


def spectral_problem(module: Any, ranks: int, x: Tensor) -> str:
    """Why such a module is refused; empty if it is not."""
    counts = {matrices.shape[dim] for matrices, dim in matrices_of(module).values()}
    if len(counts) != 1 or x.ndim < 4:
        return (
            f"matrices of {counts} modes of columns: it has parameters (in, out, …, modes of columns), all of as many "
            f"modes, and inputs (batch, channels, rows, …, columns)"
        )
    (modes,) = counts
    if modes < ranks:
        return f"{modes} modes of columns on cp {ranks}: each rank needs one; use a smaller cp"
    return ""


class _Transforms(TorchFunctionMode):
    """Inside, `torch.fft` transforms a field whose rows are on several ranks.

    Attributes:
        x: (batch, channels, rows, …, columns), this rank's rows.
        rows: how they lie over the ranks.
        modes: how the modes of columns do.
        stand_in: what the module gets in place of x, for its sizes: all rows, and as many columns as have this rank's
            modes. Its values are NaN: whatever is not a transform shows.
    """

    def __init__(self, x: Tensor, rows: Axis, modes: Axis) -> None:
        super().__init__()
        self.x = x
        self.rows = rows
        self.modes = modes
        first, end = modes.have[modes.rank]
        # A real field of 2n - 1 columns has n modes.
        columns = 2 * (end - first) - 1
        shape = list(x.shape)
        shape[rows.dim] = rows.length
        shape[-1] = columns
        self.stand_in = x.new_full((), float("nan")).expand(shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Attributes have no name of their own.
        name = getattr(func, "__name__", "")
        if name.startswith("fft_"):
            return self.transformed(name, *args, **kwargs)
        return func(*args, **kwargs)

    def transformed(self, name: str, x: Tensor, s: Any = None, dim: Any = None, norm: str | None = None) -> Tensor:
        """What a function of `torch.fft` returns, of its arguments: for the stand-in this rank's modes of all rows,
        (batch, channels, rows, …, own modes), and for these this rank's rows."""
        if dim is None and name.endswith("2"):
            dim = (-2, -1)
        dims = [index % x.ndim for index in dim or ()]
        is_forward = x is self.stand_in and s is None
        if name not in (TRANSFORMS if is_forward else INVERSES) or dims != list(range(self.rows.dim, x.ndim)):
            raise ConfigError(
                f"cp_style space: {name} along {dim}: a module that has the style `spectral` transforms its input by "
                f"rfft2 or rfftn along all dims from rows to columns, and back"
            )
        if is_forward:
            modes = torch.fft.rfft(self.x, norm=norm)[..., : self.modes.length]
            return torch.fft.fftn(transposed(modes, self.rows, self.modes), dim=dims[:-1], norm=norm)
        modes = torch.fft.ifftn(x, dim=dims[:-1], norm=norm)
        # Modes that have no matrix are zero.
        return torch.fft.irfft(transposed(modes, self.modes, self.rows), n=self.x.shape[-1], norm=norm)


def transposed(x: Tensor, have: Axis, want: Axis) -> Tensor:
    """Split a tensor along ``want.dim`` instead of ``have.dim``, which becomes whole. A collective of the ranks."""
    route = []
    for target, (first, end) in enumerate(want.have):
        own = end - first
        for source, (row, next_row) in enumerate(have.have):
            rows = next_row - row
            route.append(Move(source, first * rows, target, row * own, rows * own))
    # (wanted dim · rows, …): in this order, what another rank wants is consecutive.
    flat = x.movedim((want.dim, have.dim), (0, 1)).flatten(0, 1)
    lengths = [move.length for move in route if move.target == want.rank]
    taken = have._replace(dim=0).move(flat, tuple(route), sum(lengths))
    first, end = want.have[want.rank]
    # From each rank (own part of the wanted dim, its rows, …).
    blocks = [piece.unflatten(0, (end - first, -1)) for piece in taken.split(lengths)]
    return torch.cat(blocks, 1).movedim((0, 1), (want.dim, have.dim))
