"""Every operator on a field that is split, next to plain PyTorch on the full field: outputs and all gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmm.parallel.cp.space.apply import apply_space
from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.cp.space.windows import shifted_windows
from mmm.parallel.plan import Field

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


def cases(is_tile):
    image = (CHANNELS, ROWS, COLUMNS)
    for group in (convolutions, transposed, pools, other):
        for module in group():
            # Columns are split too.
            if is_tile and isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
                continue
            yield module, image
    if not is_tile:
        yield nn.AdaptiveAvgPool2d(1), image
        yield from spaces()


def error_of(module, shape, groups):
    """The largest error of a rank's output and of all gradients, relative to the largest number of each."""
    module = module.double()
    split = Split(groups)
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
    copies = split.groups[0].size() if is_mean else 1
    field = Field(shape, styles={Windows: shifted_windows}, targets=None if is_mean else 2)
    read_fields(module, field, [group.size() for group in groups])
    apply_space(module, field, groups)
    own = module(local)
    own_weight = weight if is_mean else split.own(weight, 2)
    loss = (own.tanh() * own_weight).sum() / copies
    gradients = torch.autograd.grad(loss, [local, *parameters])
    pairs = [(own, y if is_mean else split.own(y, 2)), (gradients[0], split.own(expected[0], 2))]
    for gradient, full in zip(gradients[1:], expected[1:], strict=True):
        for group in groups:
            dist.all_reduce(gradient, group=group)
        pairs.append((gradient, full))
    errors = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    return torch.stack(errors).max().item()


def errors_on(rank, sizes):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "columns")[: len(sizes)])
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    errors = {}
    for index, (module, shape) in enumerate(cases(len(sizes) > 1)):
        errors[f"{index}: {module}"] = error_of(module, shape, groups)
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
    read_fields(model, field, [2])
    apply_space(model, field, [group])
    own = gradients(model, Split([group]).own(x, 2).clone())
    errors = []
    for gradient, full in zip(own, expected, strict=True):
        dist.all_reduce(gradient, group=group)
        errors.append((gradient - full).abs().max() / full.abs().max())
    return torch.stack(errors).max().item()


def test_a_second_derivative_that_lacks_the_other_ranks(run_on_ranks):
    """A penalty on the gradient of the input goes through halos and sums twice."""
    for error in run_on_ranks(penalty_gradients, 2):
        assert error <= 1e-13


# Three ranks have 7, 8 and 8 rows, and later 3, 4, 4 or 15, 15, 16.
MESHES = [(3,), *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((2,), (4,), (2, 2)))]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_an_operator_that_lacks_a_row_or_a_gradient(run_on_ranks, sizes):
    """Fields of 23 rows in strips, and of 23 × 13 in tiles: what each rank has is what plain PyTorch has there."""
    for errors in run_on_ranks(errors_on, torch.Size(sizes).numel(), sizes):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-13}
        assert not wrong
