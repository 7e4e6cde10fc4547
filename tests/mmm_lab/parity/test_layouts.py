"""Names of layouts, and the matrix."""

import pytest

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm_lab.parity import models
from mmm_lab.parity.layouts import ParityCase, canonical, matrix, optimizers_for, ranks_of, sizes_of
from mmm_lab.parity.registry import REGISTRY

CASES = {name: list(matrix(name)) for name in models.NAMES}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("pp2.dp2.tp2", "pp2·dp2·tp2"),
        ("tp2·pp2.dp2", "pp2·dp2·tp2"),
        ("dp_shard4", "dp4"),
        ("dp_shard2.dp_replicate2", "dp_replicate2·dp_shard2"),
        ("cp=4,pp1", "cp4"),
        ("1", "1"),
        ("tp1", "1"),
        ("ep2.dp4", "dp4·ep2"),
    ],
)
def test_names(spelling, name):
    assert canonical(spelling) == name
    assert canonical(name) == name
    assert str(Layout(**{"dp_shard": 1, **sizes_of(spelling)})) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pp2.xp2", "'xp2'"),
        ("dp", "dp2"),
        ("zero1", "'zero1'"),
        ("", "'' is not an axis"),
        ("tp0", "tp 0: an axis has 1 to 1,048,576 ranks"),
        (f"tp{'9' * 5000}", "tp 99999999999999999999: an axis has"),
        ("tp2.tp2", "has tp twice"),
        ("dp2.dp_replicate2", "next to dp_replicate write dp_shard"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ConfigError, match=message):
        canonical(name)


def test_numbers_of_ranks():
    assert ranks_of(["1..8"]) == set(range(1, 9))
    assert ranks_of(["4", "1,2"]) == {1, 2, 4}
    for wrong in ("0", "8..1", "two", ""):
        with pytest.raises(ConfigError, match="--ranks"):
            ranks_of([wrong])


def test_optimizers():
    """SGD everywhere; AdamW too where a technique stands alone."""
    both = {case.layout for case in CASES["transformer"] if case.optimizers == ("sgd", "adamw")}
    assert {"dp2", "tp4", "cp2", "pp4", "dp_replicate2·dp_shard2"} < both
    assert not {"dp2·tp2", "pp2·dp2·tp2"} & both
    assert optimizers_for(ParityCase(model="cnn", layout="pp2·dp2")) == ("sgd",)


def test_models_of_the_registry_and_of_files(tmp_path, monkeypatch):
    assert set(models.NAMES) == set(REGISTRY)
    assert models.find("gpt") is REGISTRY["gpt"]
    for name in ("resnet", "nowhere.mlp", "nowhere/mlp.py", "mmm.nn.weights"):
        with pytest.raises(ConfigError, match=rf"{name}.*the models here are"):
            models.find(name)
    monkeypatch.chdir(tmp_path)
    text = "from mmm_lab.parity.parity_model import ParityModel\n"
    for folder in ("a", "b"):  # two files of one name
        (tmp_path / folder).mkdir()
        own = f"{text}PARITY = ParityModel(model={folder!r}.upper, plan=None, batch=None)"
        (tmp_path / folder / "mlp_of_a_test.py").write_text(own)
    assert [models.find(f"{folder}/mlp_of_a_test.py").model() for folder in "aba"] == ["A", "B", "A"]
    (tmp_path / "number_of_a_test.py").write_text("PARITY = 3")
    with pytest.raises(ConfigError, match="no ParityModel"):
        models.find("number_of_a_test.py")
