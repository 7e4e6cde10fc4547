"""``mmm draw``: names of layouts, hosts, and what is wrong in one line."""

import re
from types import SimpleNamespace

import pytest

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm_lab.cli import main as cli
from mmm_lab.cli.draw import name_of
from mmm_lab.cli.draw_layout import layout_of, trainer_flags
from mmm_lab.planner.picture.facts import Facts


@pytest.mark.parametrize(
    ("text", "sizes", "technique"),
    [
        ("dp2·tp2", {"dp_shard": 2, "tp": 2}, ""),
        ("pp2.dp2,tp2", {"pp": 2, "dp_shard": 2, "tp": 2}, ""),
        ("1", {}, ""),
        ("ddp8", {"dp_shard": 8}, "ddp"),
        ("zero1", {"dp_shard": 4}, "zero1"),
        ("zero2:8", {"dp_shard": 8}, "zero2"),
        ("zero1.dp2.tp2", {"dp_shard": 2, "tp": 2}, "zero1"),
        ("hsdp8", {"dp_replicate": 2, "dp_shard": 4}, "hsdp"),
        ("ulysses4", {"cp": 4}, ""),
        ("ulysses.cp2", {"cp": 2}, ""),
        ("ring", {"cp": 4}, ""),
        ("dp4.ep2", {"dp_shard": 4, "ep": 2}, ""),
    ],
)
def test_names_of_layouts(text, sizes, technique):
    # of its file
    assert name_of(text) == re.sub(r"\W", "-", text)
    layout, techniques = layout_of(text)
    assert {axis: size for axis, size in {**layout.sizes, "ep": layout.ep}.items() if size > 1} == sizes
    assert techniques.data_parallel == (technique or "fsdp")


@pytest.mark.parametrize("text", ["tp3", "ulysses3.tp2", "cp3", "pp5.tp12", "usp4", "dp6.ep3"])
def test_the_small_model_goes_with_the_layout(text):
    layout, techniques = layout_of(text)
    argv = trainer_flags(layout, techniques, [])
    pairs = dict(zip(argv[::2], argv[1::2], strict=True))
    assert int(pairs["--n_heads"]) % (layout.tp * (layout.cp if techniques.cp_style != "ring" else 1)) == 0
    assert int(pairs["--seq_length"]) % (2 * layout.cp * layout.tp) == 0
    assert int(pairs["--n_layers"]) >= layout.pp
    assert int(pairs.get("--n_experts", layout.ep)) % layout.ep == 0


def test_flags_of_the_user_count():
    flags = trainer_flags(*layout_of("dp2.tp2"), ["--preset", "llama-8b", "--seq-length=64"])
    assert "--dim" not in flags
    assert "--seq_length" not in flags
    assert flags[-3:] == ["--preset", "llama-8b", "--seq-length=64"]
    # A preset's own experts are not replaced by four.
    assert "--n_experts" not in trainer_flags(*layout_of("dp4.ep2"), ["--preset", "mixtral-8x7b"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dp2.pt2"], "'dp2.pt2': 'pt2'"),
        (["dp2.tp"], "'tp' is not an axis with its size"),
        (["dp0"], "'dp0'"),
        (["dp2.dp2"], "'dp2.dp2' has dp_shard"),
        (["ddp.zero1"], "'ddp.zero1'"),
        (["dp" + "9" * 5000], "an axis has 1 to 1,048,576 ranks"),
        (["hsdp3"], "hsdp has two replicas, and 3 is odd"),
        (["dp2", "-n", "4"], "dp2 has 2"),
        (["dp2", "--out", "a.gif"], "--out a.gif"),
        (["dp2", "--out", "no/such/a.svg"], "--out no/such/a.svg"),
        (["no.such.module"], "no module named 'no.such.module'"),
        (["no_such.py"], "no_such.py"),
        (["mmm.examples.fsdp_pt"], "Did you mean mmm.examples.fsdp_tp?"),
        ([], "LAYOUT|PROGRAM"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_a_line(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["draw", *argv]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("error:") == 1
    assert not [*tmp_path.iterdir()]


def test_rows_of_fields_drawn_as_tokens():
    """There is no picture of images of 16 × 16 over cp, and one of a sequence would be wrong."""
    held = SimpleNamespace(layout=Layout(dp_shard=1, cp=2), sample=(4, 3, 16, 16))
    facts = Facts(SimpleNamespace(ranks=[SimpleNamespace(held=held)]))
    with pytest.raises(ConfigError, match="cp 2 splits the rows of fields"):
        facts.batch(0)


def test_a_program_that_fits_no_layout_is_refused_as_its_run_would_be(capfd, tmp_path):
    assert cli.main(["draw", "dp2.tp2", "--n_heads", "3", "--out", str(tmp_path / "a.svg")]) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert not [*tmp_path.iterdir()]
