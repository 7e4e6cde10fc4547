"""Errors that name fields are shown with the flags that the user gave."""

import re
import sys

import pytest

from mmm.errors import ConfigError, LayoutError, UserError
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, Techniques, batch_sizes
from mmm.parallel.compile import check_compile
from mmm.parallel.cp.styles import check_cp_style
from mmm.parallel.pp.schedules import check_pipeline
from mmm.run.command_line import parse, with_flags
from mmm.trainer import lm

PP2 = Layout(pp=2, dp_shard=1)
PLAN = transformer_plan()


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: batch_sizes(2, 16, 4, 8), "--batch_size 2 on 4"),
        (
            lambda: check_pipeline(PP2, Techniques(microbatches=3), 8, 4),
            "--microbatches 3",
        ),
        (
            lambda: check_pipeline(PP2, Techniques(microbatches=2, stages_per_rank=2), 8, 4),
            "--stages_per_rank 2: 1F1B",
        ),
        (
            lambda: check_pipeline(PP2, Techniques(schedule="1f1b", microbatches=2), 8, 4),
            "--schedule '1f1b'",
        ),
        (lambda: check_pipeline(PP2, Techniques(microbatches=2), 8, 4, dtype="fp16"), "--dtype fp16 scales"),
        (
            lambda: check_pipeline(
                PP2, Techniques(schedule="ZBVZeroBubble", microbatches=2, compile=True, checkpointing="selective"), 8, 4
            ),
            "--compile with ZBVZeroBubble.* leave --compile out.*; --activation_checkpointing selective with",
        ),
        (lambda: check_compile(Layout(tp=2), "full"), "--compile"),
        (lambda: check_cp_style("rings"), "--cp_style"),
    ],
)
def test_fields_become_flags(check, message):
    with pytest.raises(UserError) as refused:
        check()
    assert "--" not in str(refused.value)
    assert re.search(message, with_flags(refused.value))


def test_the_line_that_fits_is_the_users_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train me.py", "--tpsize", "3"])
    monkeypatch.setitem(sys.modules, "__main__", object())
    with pytest.raises(LayoutError) as refused:
        Layout(tp=3).fit(4)
    line = "start that many, `launch -n 3 --device cpu python3 'train me.py' --tpsize 3`, or change the layout"
    assert line in with_flags(refused.value)


def test_a_choice_that_is_not_there_names_those_that_are(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lm", "--schedule", "1F2B"])
    with pytest.raises(ConfigError, match=r"1F2B.*,1F1B,") as refused:
        parse(lm.Config)
    assert "None" not in str(refused.value)


def test_help_has_real_defaults(monkeypatch, capsys):
    """None is what nobody gives: a flag's text says what is taken without it."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse(lm.Config, "A program.")
    text = capsys.readouterr().out
    assert "None" not in text
    assert "(default: )" not in text
    assert re.search(r"--n_layers INT\s+Blocks. Default, as of the flags below: the preset's.", text)
    assert re.search(r"--cp_style \{ring,ulysses,usp,space\}\s+With cp. ring:", text)
    assert "(default: 0.003)" in text
