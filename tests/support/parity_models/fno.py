"""A Fourier neural operator as people write it, after the code of Li et al.: nothing in it knows of ranks. cp splits
the rows of its fields, and between two FFTs the modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.init import Init
from mmm.parallel.cp.space.spectral import spectral
from mmm.parallel.plan import Field, Plan
from mmm_lab.parity.parity_model import ParityModel

# Neither 2 ranks nor 4 divide these.
ROWS = 21
COLUMNS = 15
WIDTH = 4
# Modes that have matrices: of rows at both ends, and of columns.
MODES = (4, 5)


class SpectralConv2d(nn.Module):
    """(batch, width, rows, columns) to the same: a matrix for each of the lowest modes; the others end here."""

    def __init__(self) -> None:
        super().__init__()
        self.weights1 = nn.Parameter(torch.zeros(WIDTH, WIDTH, *MODES, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(torch.zeros(WIDTH, WIDTH, *MODES, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        modes1, modes2 = MODES
        field = torch.fft.rfft2(x)
        shape = (x.shape[0], WIDTH, x.size(-2), x.size(-1) // 2 + 1)
        out = torch.zeros(shape, dtype=field.dtype, device=x.device)
        low = field[:, :, :modes1, :modes2]
        high = field[:, :, -modes1:, :modes2]
        out[:, :, :modes1, :modes2] = torch.einsum("bixy,ioxy->boxy", low, self.weights1)
        out[:, :, -modes1:, :modes2] = torch.einsum("bixy,ioxy->boxy", high, self.weights2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class FNO(nn.Module):
    """(batch, 3, 21, 15) to (batch, 2, 21, 15)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, WIDTH, 1)
        self.spectral = nn.ModuleList(SpectralConv2d() for _ in range(2))
        self.skip = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(2))
        self.norm = nn.LayerNorm([WIDTH, ROWS, COLUMNS])
        self.project = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral_layer, skip in zip(self.spectral, self.skip, strict=True):
            x = F.gelu(spectral_layer(x) + skip(x))
        return self.project(self.norm(x))

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn: all alike, so that no gradient is small."""
        return Init("uniform", 0.4)


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make noise: (samples, 3, 21, 15) and (samples, 2, 21, 15), float64."""
    fields = torch.randn(samples, 3, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 2, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    return fields, targets


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="sum")


def fno_plan() -> Plan:
    """The plan of `FNO`."""
    return Plan(
        tensor={},
        fsdp_units=("spectral.*", "skip.*"),
        space=Field((3, ROWS, COLUMNS), styles={SpectralConv2d: spectral}),
    )


PARITY = ParityModel(model=FNO, plan=fno_plan, batch=make_batch, loss=squared_error)
