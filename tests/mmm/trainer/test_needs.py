"""A flag that has no effect beside the others is refused, with the reason, also where its default was given."""

import pytest

from mmm.errors import ConfigError
from mmm.examples import parallel_4d
from mmm.run.command_line import configure
from mmm.trainer import cnn, lm, vit

STAGES = "without --pp: there is one stage, the model"
EXPERTS = "without --n_experts: there are no experts"


@pytest.mark.parametrize(
    ("program", "given", "words"),
    [
        (lm, {"schedule": "1F1B"}, f"--schedule 1F1B {STAGES}"),
        (lm, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (lm, {"stages_per_rank": 1}, f"--stages_per_rank 1 {STAGES}"),
        (lm, {"cp_style": "ring"}, "--cp_style"),
        (lm, {"cp": 1, "cp_style": "usp"}, "--cp_style"),
        (lm, {"ulysses": 2}, "--ulysses 2"),
        (lm, {"top_k": 2}, f"--top_k 2 {EXPERTS}"),
        (lm, {"expert_dim": 64}, f"--expert_dim 64 {EXPERTS}"),
        (lm, {"balance_rate": 0.01}, f"--balance_rate 0.01 {EXPERTS}"),
        (vit, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (cnn, {"schedule": "GPipe", "dataset": "digits"}, f"--schedule GPipe {STAGES}"),
        (lm, {"schedule": "GPipe", "parallel": "ddp"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"microbatches": 2}, f"--microbatches 2 {STAGES}"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(monkeypatch, tmp_path, program, given, words, no_process_group):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        program.train(configure(program.Config, **given))
    assert words in str(refused.value)
    assert not list(tmp_path.iterdir())
