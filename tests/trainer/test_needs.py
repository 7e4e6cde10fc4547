"""A flag that has no effect beside the others is refused, with the reason, also where its default was given."""

import pytest

from mmm.errors import ConfigError
from mmm.examples import context_parallel, parallel_4d, startup
from mmm.parallel import Layout
from mmm.trainer import cnn, lm, vit
from mmm.trainer.config.options import check_needs
from support.flags import flags

STAGES = "without --pp: there is one stage, the model"
EXPERTS = "without --n_experts: there are no experts"


@pytest.mark.parametrize(
    ("program", "given", "words"),
    [
        (lm, {"schedule": "1F1B"}, f"--schedule 1F1B {STAGES}; leave --schedule out, or give --pp 2"),
        (lm, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (lm, {"stages_per_rank": 1}, f"--stages_per_rank 1 {STAGES}"),
        (lm, {"cp_style": "ring"}, "--cp_style ring without --cp: no sequence is sharded"),
        (lm, {"top_k": 2}, f"--top_k 2 {EXPERTS}"),
        (lm, {"expert_dim": 64}, f"--expert_dim 64 {EXPERTS}"),
        (lm, {"balance_rate": 0.01}, f"--balance_rate 0.01 {EXPERTS}"),
        (vit, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (cnn, {"schedule": "GPipe", "dataset": "digits"}, f"--schedule GPipe {STAGES}"),
        (context_parallel, {"cp_style": "ulysses"}, "--cp_style ulysses without --cp: no sequence is sharded"),
        (lm, {"schedule": "GPipe", "parallel": "ddp"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"microbatches": 2}, f"--microbatches 2 {STAGES}"),
        (parallel_4d, {"model": "vit"}, "--model vit: the ViT is mmm.trainer.vit, the CNN mmm.trainer.cnn"),
        (startup, {"ways": ("forked",), "mpiexec": "mpiexec"}, "--mpiexec mpiexec without --ways mpiexec"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(monkeypatch, tmp_path, program, given, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmm.trainer.run.core.process_group", lambda *_: pytest.fail("a process group was made"))
    with pytest.raises(ConfigError) as refused:
        program.train(program.Config(**given))
    assert words in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_of_use():
    check_needs(lm.Config(schedule="GPipe", stages_per_rank=1), Layout(pp=2).fit(2))
    check_needs(lm.Config(cp_style="ring"), Layout(cp=2).fit(2))
    check_needs(lm.Config(n_experts=4, top_k=1), Layout().fit(1))
    chosen = parallel_4d.Config(schedule="GPipe").layout(4)  # no axis given, and pp is among those chosen
    assert chosen.pp == 2
    techniques = lm.Config(pp=2, cp=2).techniques()
    assert (techniques.schedule, techniques.cp_style) == ("1F1B", "ring")


@pytest.mark.parametrize("program", [lm, vit, cnn, context_parallel, parallel_4d, startup])
def test_what_stands_in_a_table_can_be_told_from_what_was_not_given(program):
    tables = [vars(owner).get("NEEDS", {}) for owner in program.Config.__mro__]
    named = {flag for table in tables for flag in table}
    assert named & flags(program.Config)
    assert all(getattr(program.Config(), flag) is None for flag in named)
