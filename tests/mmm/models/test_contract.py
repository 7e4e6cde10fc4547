"""What docs/models.md asks of a language model's sizes is what the package reads of them, no less and no more."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from mmm.models import definition
from mmm.models.llama import definition as llama
from mmm.models.llama.model import TransformerConfig
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm_lab.cli.main import main as mmm

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
# Its own folder, functions that a model calls with its sizes, and the record, which has all fields, whatever they are.
OF_ANY_MODEL = (
    "mmm.models.llama",
    "mmm.models.costs",
    "mmm.models.keys",
    "mmm.models.rules",
    "mmm.nn",
    "mmm.history.record",
)


@pytest.fixture(scope="module")
def listed():
    """The names of the page's two classes: those that every language model has, and those for something."""
    (code,) = re.findall(r"```python\n(class Sizes\(Protocol\):.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"Protocol": Protocol, "ClassVar": ClassVar}
    exec(code, names)
    needed = {*names["Sizes"].__annotations__, "problems"}
    return needed, {*names["MoreSizes"].__annotations__}


@pytest.fixture
def read(monkeypatch):
    """The names of a small Mixtral's sizes that anything but the model has read so far."""
    names = set()

    class Watched(TransformerConfig):
        def __getattribute__(self, name):
            reader = sys._getframe(1).f_globals["__name__"]
            is_ours = reader.startswith("mmm") and not reader.startswith(OF_ANY_MODEL)
            if is_ours and not name.startswith("__"):
                names.add(name)
            return super().__getattribute__(name)

    sizes = Watched(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=32,
        n_experts=4,
        softmax_router=True,
    )
    # The same model, whose sizes say who reads them.
    watched = replace(llama.MODEL, config=Watched, presets={"debug": sizes})
    monkeypatch.setattr(llama, "MODEL", watched)
    definition.find.cache_clear()
    yield names
    definition.find.cache_clear()


@pytest.mark.long
def test_a_name_that_is_read_and_not_listed_would_break_a_new_model(listed, read, tmp_path):
    flags = {
        "seq_length": 16,
        "global_batch_size": 2,
        "max_iters": 1,
        "eval_batches": 1,
        "plots": False,
    }
    run = tmp_path / "run"
    lm.train(configure(lm.Config, **flags, preset="debug", checkpoint_every=1, device="cpu", outdir=run))
    # What --init_from reads, it reads before a step.
    lm.resolve(configure(lm.Config, **flags, init_from=run))
    assert mmm(["export", str(run), "-o", str(tmp_path / "hf")]) == 0
    assert mmm(["plan", "--model", "debug", "--site", "polaris", "--nhosts", "1", "--global-batch", "64"]) == 0
    needed, more = listed
    assert read == needed | more


def test_every_language_model_has_what_is_needed(listed):
    needed, _ = listed
    for model in map(definition.find, definition.NAMES):
        if model.language:
            for sizes in model.presets.values():
                assert [name for name in needed if not hasattr(sizes, name)] == [], model.name
