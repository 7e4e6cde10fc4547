"""Every operator on a field that is split, next to plain PyTorch on the full field: outputs and all gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmm.errors import ConfigError
from mmm.parallel.cp.space.apply import apply_space
from mmm.parallel.cp.space.spectral import spectral
from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.cp.space.windows import shifted_windows
from mmm.parallel.plan import Field
from mmm.traffic.count import count_traffic

F64 = torch.float64
CHANNELS = 4
# Neither divides by 2, 3 or 4.
ROWS = 23
COLUMNS = 13


class Windows(nn.Module):
    """Attention without weights within shifted windows, channels last: pads, rolls, masks where the ends meet, rolls
    back. Written for one device."""

    def __init__(self, window, shift):
        super().__init__()
        self.window = window
        self.shift = shift

    def split(self, x):
        """(batch, rows, columns, channels) to (batch, windows, window², channels)."""
        batch, rows, columns, channels = x.shape
        side = self.window
        x = x.view(batch, rows // side, side, columns // side, side, channels)
        return x.transpose(2, 3).reshape(batch, -1, side * side, channels)

    def forward(self, x):
        batch, rows, columns, channels = x.shape
        side = self.window
        x = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        _, height, width, _ = x.shape
        x = x.roll((-self.shift, -self.shift), (1, 2))
        # Which end of the field a row, and a column, is from.
        from_top = torch.arange(height, device=x.device) >= height - self.shift
        from_left = torch.arange(width, device=x.device) >= width - self.shift
        ends = (2 * from_top.long()[:, None] + from_left.long()).view(1, height, width, 1)
        # (1, windows, window², 1)
        ends = self.split(ends)
        mask = ends == ends.transpose(2, 3)
        places = self.split(x)
        y = F.scaled_dot_product_attention(places, places, places.sin(), mask)
        y = y.view(batch, height // side, width // side, side, side, channels).transpose(2, 3)
        y = y.reshape(batch, height, width, channels)
        return y.roll((self.shift, self.shift), (1, 2))[:, :rows, :columns]


class Spectral(nn.Module):
    """Matrices for the lowest modes of a field, as in the code of Li et al. Written for one device.

    Args:
        modes: how many of each dim of space, of rows at both ends.
        is_pairs: whether the matrices are pairs of real numbers.
    """

    def __init__(self, *modes, is_pairs=False):
        super().__init__()
        self.modes = modes
        self.is_pairs = is_pairs
        shape = (CHANNELS, 3, *modes)
        self.low = nn.Parameter(torch.zeros(*shape, 2) if is_pairs else torch.zeros(shape, dtype=torch.complex128))
        self.high = nn.Parameter(self.low.detach().clone())

    def forward(self, x):
        dims = tuple(range(2, x.ndim))
        modes = torch.fft.rfftn(x, dim=dims, norm="ortho")
        shape = (len(x), 3, *x.shape[2:-1], x.shape[-1] // 2 + 1)
        y = torch.zeros(shape, dtype=modes.dtype, device=x.device)
        rows, *others = (slice(count) for count in self.modes)
        for matrices, ends in ((self.low, rows), (self.high, slice(-self.modes[0], None))):
            if self.is_pairs:
                matrices = torch.view_as_complex(matrices)
            box = (..., ends, *others)
            y[box] = torch.einsum("bi...,io...->bo...", modes[box], matrices)
        return torch.fft.irfftn(y, x.shape[2:], dims, norm="ortho")


class Last(nn.Module):
    """A module of channels last, between two of channels first."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convolutions():
    for mode in ("zeros", "circular", "reflect", "replicate"):
        # Kernel, stride, dilation: also kernels above a strip, and strides above the kernel.
        for kernel, stride, dilation in (
            (1, 1, 1),
            (3, 1, 1),
            (3, 2, 1),
            (5, 2, 1),
            (3, 1, 3),
            (4, 3, 1),
            (1, 2, 1),
            (7, 1, 2),
        ):
            padding = (kernel - 1) * dilation // 2
            yield nn.Conv2d(CHANNELS, 6, kernel, stride, padding, dilation, groups=2, padding_mode=mode)
    yield nn.Conv2d(CHANNELS, 2, 4, padding="same")
    yield nn.Conv2d(CHANNELS, 2, (5, 3), padding="valid", bias=False)
    yield nn.Conv2d(CHANNELS, 2, 3, padding=4)


def transposed():
    # Kernel, stride, padding, output padding, dilation.
    yield nn.ConvTranspose2d(CHANNELS, 6, 2, 2, 0, 0, 2)
    yield nn.ConvTranspose2d(CHANNELS, 6, 4, 2, 1, 0, 2)
    yield nn.ConvTranspose2d(CHANNELS, 6, 3, 2, 1, 1, 2)
    yield nn.ConvTranspose2d(CHANNELS, 6, 3, 1, 1, 0, 2)
    yield nn.ConvTranspose2d(CHANNELS, 6, 3, 3, 0, 2, 2)
    # A stride above the kernel leaves rows that have only the bias.
    yield nn.ConvTranspose2d(CHANNELS, 6, 1, 3, 0, 1, 2)
    yield nn.ConvTranspose2d(CHANNELS, 6, 3, 2, 2, 1, 2, dilation=2)


def pools():
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)):
        yield nn.MaxPool2d(kernel, stride, padding)
        yield nn.AvgPool2d(kernel, stride, padding)
        yield nn.AvgPool2d(kernel, stride, padding, count_include_pad=False)
    yield nn.MaxPool2d(3, 2, 1, dilation=2)
    yield nn.AvgPool2d(2, divisor_override=3)
    yield nn.ZeroPad2d((1, 2, 3, 0))
    yield nn.CircularPad2d((0, 1, 2, 5))
    yield nn.ReflectionPad2d(2)
    yield nn.ReplicationPad2d((1, 0, 0, 3))
    yield nn.ConstantPad2d(1, 0.5)


def other():
    for factor in (2, 3, 1.5):
        yield nn.Upsample(scale_factor=factor)
        yield nn.Upsample(scale_factor=factor, mode="bilinear")
        yield nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=True)
    yield nn.Upsample(size=(31, 9), mode="nearest-exact")
    yield nn.PixelShuffle(2)
    yield nn.GroupNorm(2, CHANNELS)
    yield nn.InstanceNorm2d(CHANNELS, affine=True)
    yield nn.LayerNorm([CHANNELS, ROWS, COLUMNS])
    yield nn.LayerNorm([ROWS, COLUMNS], bias=False)
    yield nn.LayerNorm(COLUMNS)
    for shift in (0, 1, 2):
        yield Last(Windows(4, shift))


def spectra():
    yield Spectral(5, 4), (CHANNELS, ROWS, COLUMNS)
    # All modes of columns, of an even number.
    yield Spectral(11, 6, is_pairs=True), (CHANNELS, ROWS, 10)
    yield Spectral(2, 3, 4), (CHANNELS, 9, 5, 6)


def spaces():
    """Operators of one and of three dims of space, with the shape of their input."""
    line = (CHANNELS, ROWS)
    yield nn.Conv1d(CHANNELS, 3, 5, 2, 1, padding_mode="circular"), line
    yield nn.ConvTranspose1d(CHANNELS, 3, 3, 2), line
    yield nn.MaxPool1d(3, 2, 1), line
    yield nn.AvgPool1d(3, 2, 1, count_include_pad=False), line
    yield nn.Upsample(scale_factor=2, mode="linear"), line
    yield nn.InstanceNorm1d(CHANNELS), line
    yield nn.ReflectionPad1d(3), line
    block = (CHANNELS, 9, 5, 6)
    yield nn.Conv3d(CHANNELS, 2, 3, padding=1, padding_mode="replicate"), block
    yield nn.ConvTranspose3d(CHANNELS, 2, 2, 2), block
    yield nn.MaxPool3d(2, 1, 1), block
    yield nn.AvgPool3d((3, 1, 2), 1), block
    yield nn.Upsample(scale_factor=2, mode="trilinear"), block
    yield nn.GroupNorm(2, CHANNELS), block


def cases():
    image = (CHANNELS, ROWS, COLUMNS)
    for group in (convolutions, transposed, pools, other):
        for module in group():
            yield module, image
    yield nn.AdaptiveAvgPool2d(1), image
    yield from spaces()
    yield from spectra()


def error_of(module, shape, group):
    """The largest error of a rank's output and of all gradients, relative to the largest number of each."""
    module = module.double()
    split = Split(group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *shape, generator=generator, dtype=F64, requires_grad=True)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    parameters = list(module.parameters())
    y = module(x)
    weight = torch.randn(y.shape, generator=generator, dtype=F64)
    expected = torch.autograd.grad((y.tanh() * weight).sum(), [x, *parameters])
    local = split.own(x.detach(), 2).requires_grad_()
    # Every rank has the whole mean, and so the whole loss.
    is_mean = isinstance(module, nn.AdaptiveAvgPool2d)
    copies = group.size() if is_mean else 1
    field = Field(shape, styles={Windows: shifted_windows, Spectral: spectral}, targets=None if is_mean else 2)
    read_fields(module, field, group.size())
    apply_space(module, field, group)
    own = module(local)
    own_weight = weight if is_mean else split.own(weight, 2)
    loss = (own.tanh() * own_weight).sum() / copies
    gradients = torch.autograd.grad(loss, [local, *parameters])
    pairs = [(own, y if is_mean else split.own(y, 2)), (gradients[0], split.own(expected[0], 2))]
    for gradient, full in zip(gradients[1:], expected[1:], strict=True):
        dist.all_reduce(gradient, group=group)
        pairs.append((gradient, full))
    errors = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    return torch.stack(errors).max().item()


def errors_on(rank, ranks):
    torch.manual_seed(0)
    group = init_device_mesh("cpu", (ranks,)).get_group()
    errors = {}
    for index, (module, shape) in enumerate(cases()):
        errors[f"{index}: {module}"] = error_of(module, shape, group)
    return errors


def penalty_gradients(rank):
    """The largest error of the gradients of a penalty on the gradient of the input."""

    def gradients(model, x):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(model.parameters()))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular", bias=False),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 4, 2, 1, bias=False),
    ).double()
    x = torch.randn(2, 3, 7, 8, dtype=F64)
    expected = gradients(model, x.clone())
    group = init_device_mesh("cpu", (2,)).get_group()
    field = Field((3, 7, 8))
    read_fields(model, field, 2)
    apply_space(model, field, group)
    own = gradients(model, Split(group).own(x, 2).clone())
    errors = []
    for gradient, full in zip(own, expected, strict=True):
        dist.all_reduce(gradient, group=group)
        errors.append((gradient - full).abs().max() / full.abs().max())
    return torch.stack(errors).max().item()


def test_a_second_derivative_that_lacks_the_other_ranks(run_on_ranks):
    """A penalty on the gradient of the input goes through halos and sums twice."""
    for error in run_on_ranks(penalty_gradients, 2):
        assert error <= 1e-13


class Complex(Spectral):
    """Its transform has the modes to keep at both ends of the columns."""

    def forward(self, x):
        return torch.fft.ifft2(torch.fft.fft2(x)).real


def refusal_of(rank):
    module = Complex(5, 4)
    group = init_device_mesh("cpu", (2,)).get_group()
    field = Field((CHANNELS, ROWS, COLUMNS), styles={Complex: spectral})
    read_fields(module, field, 2)
    apply_space(module, field, group)
    with pytest.raises(ConfigError) as refusal:
        module(torch.zeros(2, CHANNELS, 11 + rank.rank, COLUMNS))
    return str(refusal.value)


def test_modes_that_a_rank_would_take_for_its_own(run_on_ranks):
    """Of a complex transform each rank would keep the first of its own modes, and fewer modes than ranks leave one
    without any."""
    for text in run_on_ranks(refusal_of, 2):
        assert "fft_fft2" in text
    field = Field((CHANNELS, ROWS, COLUMNS), styles={Spectral: spectral})
    with pytest.raises(ConfigError, match="2 modes of columns on cp 3"):
        read_fields(Spectral(5, 2), field, 3)


def traffic_cases(ranks):
    """Modules, and the elements that all ranks send in a forward and a backward, by the formulas of docs/space.md."""
    row = 2 * CHANNELS * 10
    borders = ranks - 1
    yield nn.Conv2d(CHANNELS, 4, 3, padding=1), 2 * 2 * borders * row
    yield nn.Conv2d(CHANNELS, 4, 3, padding=1, padding_mode="circular"), 2 * 2 * ranks * row
    yield nn.Conv2d(CHANNELS, 4, 5, padding=2), 2 * 4 * borders * row
    yield nn.Conv2d(CHANNELS, 4, 3, 2, padding=1), 2 * borders * row
    yield nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.MaxPool2d(2), nn.GroupNorm(2, 4)), 0
    yield nn.ConvTranspose2d(CHANNELS, 4, 2, 2), 0
    yield nn.Upsample(scale_factor=2, mode="bilinear"), 2 * 2 * borders * row
    yield Last(Windows(4, 0)), 0
    # Two rows go there, and two come back.
    yield Last(Windows(4, 2)), 2 * 4 * ranks * row
    # 4 modes, of two numbers each, of 32 rows, with 4 channels before the matrices and 3 behind them.
    modes = 2 * (CHANNELS + 3) * 32 * 4 * 2
    yield Spectral(5, 4), 2 * modes * borders // ranks


def elements_sent(rank, ranks):
    group = init_device_mesh("cpu", (ranks,)).get_group()
    elements = []
    for module, _ in traffic_cases(ranks):
        module = module.double()
        field = Field((CHANNELS, 32, 10), styles={Windows: shifted_windows, Spectral: spectral})
        read_fields(module, field, ranks)
        apply_space(module, field, group)
        x = torch.randn(2, CHANNELS, 32 // ranks, 10, dtype=F64, requires_grad=True)
        with count_traffic() as traffic:
            module(x).sum().backward()
        sent = [entry.sent for (_, operation), entry in traffic.entries.items() if operation == "all_to_all"]
        # Bytes to elements.
        elements.append(sum(sent) / 8)
    return elements


@pytest.mark.long
def test_an_operator_that_sends_more_than_its_formula(run_on_ranks):
    """To the element: a rank that sends a row too many computes the same."""
    ranks = 4
    sent = torch.tensor(run_on_ranks(elements_sent, ranks, ranks)).sum(0)
    assert sent.tolist() == [formula for _, formula in traffic_cases(ranks)]


# Three ranks have 7, 8 and 8 rows, and later 3, 4, 4 or 15, 15, 16.
RANKS = [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))]


@pytest.mark.parametrize("ranks", RANKS)
def test_an_operator_that_lacks_a_row_or_a_gradient(run_on_ranks, ranks):
    """Fields of 23 rows in strips: what each rank has is what plain PyTorch has there."""
    for errors in run_on_ranks(errors_on, ranks, ranks):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-13}
        assert not wrong
