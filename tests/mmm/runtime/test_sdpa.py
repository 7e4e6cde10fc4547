"""Attention by a kernel that the device lacks is refused before the ranks meet, with those that it has."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from mmm.errors import DeviceError
from mmm.models.vit import SDPA_BACKENDS
from mmm.runtime.sdpa import check_sdpa
from mmm.trainer.config.command_line import configure
from mmm.trainer.vit import Config, train

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SDPA_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_refused_just_where_a_forward_fails(name, dtype):
    q = torch.randn(2, 3, 9, 8, dtype=dtype)
    try:
        with sdpa_kernel(SDPA_BACKENDS[name]):
            F.scaled_dot_product_attention(q, q, q)
    except RuntimeError:
        with pytest.raises(DeviceError, match=rf"sdpa_backend '{name}'.* on cpu for {dtype} .*; use auto, math"):
            check_sdpa(name, SDPA_BACKENDS, CPU, dtype, (9, 8))
    else:
        check_sdpa(name, SDPA_BACKENDS, CPU, dtype, (9, 8))


def test_nothing_is_asked_of_auto():
    check_sdpa("auto", SDPA_BACKENDS, torch.device("meta"), torch.float32, (9, 8))


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_the_trainer_refuses(name, tmp_path):
    with pytest.raises(DeviceError, match=rf"sdpa_backend '{name}'.* use auto, math, flash"):
        train(configure(Config, device="cpu", sdpa_backend=name, max_iters=1, outdir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
