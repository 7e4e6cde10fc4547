"""What may not be between modules of a field that is split: refused by name, before ranks meet."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Layout, Techniques
from mmm.parallel.checks import check_techniques
from mmm.parallel.cp.space.split import NOTES
from mmm.parallel.cp.space.trial import read_fields
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Field, Plan

SHAPE = (4, 16, 12)
SPACE = Techniques(cp_style="space")
CP2 = Layout(dp_shard=1, cp=2)


class Of(nn.Module):
    """A convolution, and then a function of its output."""

    def __init__(self, function, *modules):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.function = function
        self.others = nn.ModuleList(modules)
        self.register_buffer("north", torch.zeros(1, 1, 16, 1))

    def forward(self, x):
        return self.function(self.conv(x), self)


def patches(x):
    """Rows, two by two, to channels."""
    batch, channels, rows, columns = x.shape
    pairs = x.reshape(batch, channels, rows // 2, 2, columns)
    return pairs.transpose(2, 3).reshape(batch, 2 * channels, rows // 2, columns)


def halves(x):
    """The upper half of the rows, and the lower half, to channels: each rank would take its own halves."""
    batch, channels, rows, columns = x.shape
    return x.reshape(batch, channels, 2, rows // 2, columns).flatten(1, 2)


REFUSED = {
    "roll": lambda x, _: x.roll(1, 2),
    # Without dims, over the whole field.
    "roll flat": lambda x, _: x.roll(1),
    "amax": lambda x, _: x - x.amax(),
    "norm": lambda x, _: x / torch.linalg.vector_norm(x),
    "mean": lambda x, _: x - x.mean((2, 3), keepdim=True),
    "std": lambda x, _: x / x.std(),
    "interpolate": lambda x, _: F.interpolate(x, scale_factor=2),
    "pad": lambda x, _: F.pad(x, (0, 0, 1, 1)),
    # Rows from the other end, as many as before.
    "circular": lambda x, _: F.pad(x, (0, 0, 1, -1), mode="circular"),
    "constant_pad_nd": lambda x, _: F.pad(x, (0, 0, 1, -1)),
    "topk": lambda x, _: x.topk(2, 2).values,
    "conv2d": lambda x, model: F.conv2d(x, model.conv.weight),
    "fft": lambda x, _: torch.fft.rfft2(x).abs(),
    "slice": lambda x, _: x[:, :, 1:],
    "strided": lambda x, _: x[:, :, ::2],
    "flip": lambda x, _: x.flip(2),
    "softmax": lambda x, _: x.softmax(2),
    "attention": lambda x, _: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x, _: F.dropout(x),
    "cumsum": lambda x, _: x.cumsum(2),
    "cat": lambda x, _: torch.cat((x, x), 2),
    "chunk": lambda x, _: x.chunk(2, 2)[0],
    "unfold": lambda x, _: x.unfold(2, 2, 2),
    "max_pool2d": lambda x, _: F.max_pool2d(x, 2),
    "view": lambda x, _: halves(x),
    "arange": lambda x, _: x * torch.arange(x.shape[2], device=x.device).view(-1, 1),
    "rand": lambda x, _: x + torch.rand_like(x),
    # The number of rows, in a formula.
    "mul": lambda x, _: x * x.shape[2] ** -0.5,
    # A matrix of the rows' size, and a buffer that the plan does not name.
    "transposed": lambda x, _: x @ x.transpose(2, 3),
    "parameters": lambda x, model: x + model.north,
    # Two fields of one module, of 16 and 15 rows: a rank has 8 of each.
    "15 and of 16": lambda x, model: model.conv(model.others[0](x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_mixes_rows_in_silence(name):
    """Each would train with another function than on one device: rank by rank instead of over the field."""
    model = Of(REFUSED[name], nn.Conv2d(4, 4, (2, 3), padding=(0, 1)))
    with pytest.raises(ConfigError) as refusal:
        read_fields(model, Field(SHAPE), 2)
    text = str(refusal.value)
    assert "space" in text
    # The line of the program.
    assert name in text or "test_trial.py" in text


ACCEPTED = {
    "channels": lambda x, _: F.gelu(torch.cat((x, x), 1)).chunk(2, 1)[0],
    "a gate of the channels": lambda x, _: x * x.mean(1, keepdim=True).sigmoid(),
    "columns are whole": lambda x, _: x.roll(1, 3) + x.flip(3),
    "patches in the order of the rows": lambda x, _: patches(x),
    "a residual": lambda x, model: x + model.conv(x),
    "places and back": lambda x, _: x.flatten(2).transpose(1, 2).softmax(2).transpose(1, 2).reshape(x.shape),
    "a mask of land": lambda x, _: x.masked_fill(x > 1, float("nan")).nan_to_num(),
    "columns are padded": lambda x, _: F.pad(F.pad(x, (1, 2, 0, 0), mode="circular"), (1, 0)) + F.pad(x, (4, 0, 0, 0)),
    "channels are compared": lambda x, _: x.topk(2, 1).values / x.std(1, keepdim=True) - x.max(1, keepdim=True)[0],
    "zeros": lambda x, _: torch.where(x > 0, x, torch.zeros_like(x)) + x.new_zeros(x.shape),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_forward_of_places_is_not_refused(name):
    """The trial must not refuse what every model does."""
    model = Of(ACCEPTED[name])
    read_fields(model, Field(SHAPE), 2)
    assert getattr(model.conv, NOTES)[2] == 2 * [{8: ((0, 8), (8, 16))}]


@pytest.mark.parametrize(
    "function",
    [lambda x, model: x + model.north, lambda x, _: x.expand(-1, -1, 16, -1)],
    ids=["a field that the plan does not name", "expand"],
)
def test_a_row_that_is_broadcast_in_silence(function):
    """Of 16 rows, each of 16 ranks has one: it fits to whatever has all of them."""
    with pytest.raises(ConfigError, match=r"test_trial.py"):
        read_fields(Of(function), Field(SHAPE, targets=None), 16)


def test_patches_that_do_not_divide_a_strip():
    """18 rows are 9 on each of 2 ranks, which are no pairs."""
    with pytest.raises(ConfigError, match=r"test_trial.py.*4, 4, 2, 12"):
        read_fields(Of(lambda x, _: patches(x)), Field((4, 18, 12)), 2)


MODULES = [
    (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
    (nn.MaxPool2d(2, return_indices=True), "return_indices"),
    (nn.AdaptiveAvgPool2d(2), "output_size"),
    (nn.AdaptiveMaxPool2d(1), "adaptive_max_pool2d"),
    (nn.Upsample(scale_factor=2, mode="bicubic"), "bicubic"),
    (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats"),
    (nn.Softmax(2), "_softmax"),
    (nn.Softmax2d(), ""),
]


@pytest.mark.parametrize(("module", "name"), MODULES, ids=str)
def test_a_module_that_no_style_computes(module, name):
    model = nn.Sequential(module)
    if not name:
        # It is over the channels.
        read_fields(model, Field(SHAPE), 2)
        return
    with pytest.raises(ConfigError, match=name):
        read_fields(model, Field(SHAPE), 2)


def test_a_level_with_fewer_rows_than_ranks():
    """The field has a row for each rank, and its third level has not."""
    levels = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2), nn.MaxPool2d(2))
    read_fields(levels, Field(SHAPE), 2)
    with pytest.raises(LayoutError, match=r"2 rows on cp 4.*2 "):
        read_fields(levels, Field(SHAPE), 4)
    with pytest.raises(LayoutError, match="16 rows on cp 17"):
        read_fields(levels, Field(SHAPE), 17)


@pytest.mark.parametrize(
    ("module", "dim"), [(nn.Conv2d(4, 4, 1), 1), (nn.MaxPool2d(2), 1), (nn.BatchNorm2d(4), 1), (nn.Linear(12, 12), 3)]
)
def test_a_plan_whose_rows_are_channels(module, dim):
    """Each has its matrix or its meaning along this dim: ranks would fail after they met, or pool along other dims."""
    with pytest.raises(ConfigError):
        read_fields(module, Field(SHAPE, dim, targets=dim), 2)


def refused(plan, shape=SHAPE, model=None, error=ConfigError):
    """What `partition_model` says, which needs no ranks."""
    with pytest.raises(error) as refusal:
        partition_model(model or nn.Conv2d(4, 4, 3), plan, CP2, SPACE, torch.empty(2, *shape, device="meta"))
    return str(refusal.value)


def test_a_plan_that_does_not_fit():
    assert "Plan.space" in refused(Plan({}, ()))
    assert "(4, 15, 12)" in refused(Plan({}, (), space=Field(SHAPE)), (4, 15, 12))
    dropout = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout2d(0.1))
    assert "Dropout2d of 0.1" in refused(Plan({}, (), space=Field(SHAPE)), model=dropout)
    assert "space.targets" in refused(Plan({}, (), space=Field(SHAPE, targets=None)))
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert "space.targets" in refused(Plan({}, (), space=Field(SHAPE)), model=pooled)


def test_compiled_modules_do_not_send_rows():
    plan = Plan({}, (), space=Field(SHAPE))
    with pytest.raises(LayoutError, match="compile"):
        check_techniques(nn.Conv2d(4, 4, 3), plan, CP2, Techniques(cp_style="space", compile=True))
