"""What the tests of `make test-gpu` call still exists: as far as a CPU has it, they run here as well."""

import importlib.util
from pathlib import Path

import pytest
import torch

from mmm.models.llama.model import TransformerConfig


@pytest.fixture(scope="module")
def of_gpu():
    """The module test_device.py."""
    spec = importlib.util.spec_from_file_location("test_device", Path(__file__).with_name("test_device.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_training_makes_a_row(of_gpu):
    """A run's constructor that changes breaks three tests that only a GPU runs."""
    config = TransformerConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=64, ffn_dim=96)
    cpu = torch.device("cpu")
    with of_gpu.process_group(of_gpu.ALONE, cpu, 60.0), of_gpu.ignore_views():
        training = of_gpu.Training("cpu", config, (2, 16), of_gpu.FP32)
        first = training.step(due=True).loss
        assert training.step() is None
        assert training.step(due=True).loss < first
    assert training.least == 4 * sum(parameter.numel() for parameter in training.model.parameters())


@pytest.mark.long
def test_its_commands_run(of_gpu, tmp_path):
    """A command's new name or words break what only a GPU runs."""
    of_gpu.test_deterministic_runs_have_the_same_bits("cpu", tmp_path, "lm", "--preset debug --seq_length 16")
    of_gpu.test_compiled_dropout_drops_what_it_drops_on_a_cpu("cpu")
