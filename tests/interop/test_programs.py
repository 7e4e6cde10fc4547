"""``mmm verify --program`` on an unedited script of the Trainer of transformers."""

from pathlib import Path

import pytest

from mmm.data.images.torchvision_shim import import_torchvision
from mmm_verify import verify_program
from support.clock import PATIENCE

SCRIPT = Path(__file__).parent / "trainer_script.py"

pytestmark = pytest.mark.interop


def verified(tmp_path, *args):
    # transformers imports it, and its wheel does not load next to a PyTorch without CUDA. Ranks are forked from here.
    import_torchvision("transforms")
    script = [str(SCRIPT), "--output_dir", str(tmp_path), *args]
    return verify_program(script, (1, 2), one_rank_args=["--per_device_train_batch_size", "4"], timeout=PATIENCE)


@pytest.mark.parametrize("args", [[], ["--router-loss", "0"]], ids=["dense", "experts"])
def test_the_trainer(args, tmp_path):
    verdict = verified(tmp_path, *args)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert verdict.compared["batch"].startswith("the same 4 samples, in 2 parts")


def test_a_routers_loss_is_multiplied_by_the_number_of_ranks(tmp_path):
    """huggingface/transformers#48690, in 5.24.0."""
    verdict = verified(tmp_path, "--router-loss", "0.1")
    assert verdict.exit_code == 1, f"{verdict}\n{verdict.details}"
    assert verdict.first == "the loss"
    assert "mlp.gate.weight" in str(verdict)
