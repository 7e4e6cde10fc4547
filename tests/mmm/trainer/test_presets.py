"""What a preset sets besides sizes, and what a command line may say against it."""

import shlex

import pytest

from mmm.errors import ConfigError
from mmm.examples import fsdp_tp
from mmm.examples._support import sizes_of
from mmm.run.command_line import configure, parse
from mmm.trainer import lm
from mmm_lab.cli import main as cli


def parsed(monkeypatch, line):
    monkeypatch.setattr("sys.argv", ["lm", *shlex.split(line)])
    return parse(lm.Config)


@pytest.mark.parametrize("line", ["--preset shakespeare-cpu", "--preset=shakespeare-cpu"])
def test_flags_beside_a_preset(monkeypatch, tmp_path, line):
    file = tmp_path / "flags.json"
    config = parsed(monkeypatch, line)
    assert (config.model.preset, config.data.seq_length, config.run.global_batch_size) == ("shakespeare-cpu", 64, 12)
    assert (config.data.dataset, config.optimizer.weight_decay, config.optimizer.decayed) == (
        "shakespeare",
        0.1,
        "matrices",
    )
    file.write_text('{"decayed": "all"}')
    config = parsed(monkeypatch, f"{line} --seq-length 32 --batch_size 4 --text a.txt --config {file}")
    assert (config.data.seq_length, config.run.batch_size, config.run.global_batch_size) == (32, 4, None)
    assert (config.data.dataset, config.optimizer.decayed, config.optimizer.weight_decay) == ("text", "all", 0.1)
    assert parsed(monkeypatch, f"{line} --optimizer sgd").optimizer.weight_decay is None
    assert parsed(monkeypatch, f"{line} --prompt sgd").optimizer.weight_decay == 0.1
    assert parsed(monkeypatch, f"{line} --epochs 30").duration.steps(1300) == 39_000
    file.write_text('{"lr_schedule": "cosine"}')
    config = parsed(monkeypatch, f"{line} --config {file}")
    assert (config.optimizer.lr_schedule, config.optimizer.decay) == ("cosine", None)


def test_the_quick_start_ends_with_weights(monkeypatch, tmp_path, capsys):
    """`mmm.trainer.lm --preset shakespeare-cpu … --outdir DIR`, then `mmm sample DIR`: docs/language-model.md."""
    (tmp_path / "a.txt").write_text("ROMEO: but soft, what light\n" * 400)
    line = f"--preset shakespeare-cpu --tokenizer chars --text {tmp_path / 'a.txt'} --outdir {tmp_path / 'b'}"
    small = "--max_iters 2 --n_layers 1 --dim 32 --n_heads 2 --n_kv_heads 2 --ffn_dim 32 --eval_batches 1 --no_plots"
    lm.train(parsed(monkeypatch, f"{line} {small} --device cpu"))
    assert "will leave no weights" not in capsys.readouterr().out
    assert (
        cli.main(["sample", str(tmp_path / "b"), "--prompt", "ROMEO:", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    )
    assert capsys.readouterr().out.startswith("ROMEO:")


@pytest.mark.parametrize("preset", ["gpt2", "mixtral-8x7b"])
def test_an_example_takes_no_preset_that_it_does_not_shard(preset):
    """One weight for embedding and output, and experts with a softmax."""
    with pytest.raises(ConfigError, match=f"--preset {preset}"):
        sizes_of(configure(fsdp_tp.Config, preset=preset).model)
    assert sizes_of(configure(fsdp_tp.Config, preset="shakespeare").model).n_layers == 12
