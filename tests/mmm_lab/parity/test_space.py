"""``mmm verify MODEL --space rows=2``: which dims of anyone's model are rows, and whether it computes the same."""

import pytest

from mmm.errors import UserError
from mmm.parallel.dp.batch_norm import GlobalSum
from mmm.parallel.plan import Field
from mmm_lab.cli.main import main
from mmm_lab.parity.space import find_rows
from mmm_verify.errors import UserError as VerifyError
from mmm_verify.subject import make_subject
from support import space
from support.space import SMALL

# Of channels last.
LAST = (*SMALL[1:], 3)
BY_NAME = ("--step", "support.space:by_name")
BY_LATITUDE = ("--step", "support.space:by_latitude", "--mesh", "dp2")
PARAMETERS = {"position": 1, "deep": 1}


def rows_of(model, batch, step=None, ranks=2):
    return find_rows(make_subject(model, None, batch, step, "dp1"), ranks)


@pytest.mark.parametrize(
    ("model", "batch", "step", "field", "output"),
    [
        (space.Net, space.fields, None, Field(SMALL, 2, PARAMETERS, targets=2), {2: ((0, 5), (5, 11))}),
        (space.Last, space.fields_last, None, Field(LAST, 1, PARAMETERS, targets=1), {1: ((0, 5), (5, 11))}),
        (space.Net, space.fields_with_labels, space.cross_entropy, Field(SMALL, 2, PARAMETERS, targets=1), None),
        (space.Pooled, space.fields_of_classes, None, Field(SMALL, 2, targets=None), {}),
        (space.Net, space.fields, space.two_steps_ahead, Field(SMALL, 2, PARAMETERS, targets=2), None),
    ],
    ids=["channels first", "channels last", "labels", "classes", "a model that is called twice"],
)
def test_rows_that_are_taken_for_another_dim(model, batch, step, field, output):
    """Rows of the input, output and targets, and parameters with rows at two levels: 11 rows, and 11 channels too."""
    rows = rows_of(model, batch, step)
    # All that a plan says.
    assert rows.field == field
    assert output is None or rows.output == output


@pytest.mark.parametrize(
    ("model", "step", "ranks", "message"),
    [
        (space.Anomaly, None, 2, "mean.*space.py"),
        (space.Dropped, None, 2, "Dropout2d of 0.25"),
        (space.Net, None, 7, "6 rows on cp 7.*down"),
        (space.Pooled, space.of_halves, 2, r"\(4, 3, 6, 6\)"),
        (space.Net, lambda model, batch: model.head.weight.sum(), 2, "one shape"),
        (space.Scaled, lambda model, batch: model(batch[0], 3.0).sum(), 2, "one tensor"),
    ],
    ids=["a mean of the field", "dropout", "too few rows", "two sizes", "no model", "a number too"],
)
def test_a_model_whose_rows_cannot_be_split(model, step, ranks, message):
    """One line before there are ranks: what is in the way, and where."""
    with pytest.raises((UserError, VerifyError), match=message):
        rows_of(model, space.fields, step, ranks)


def verify(capfd, *arguments):
    code = main(["verify", *arguments])
    return code, *capfd.readouterr()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ("support.space:Net", "--batch", "support.space:fields", "--space", "rows=3", *BY_NAME),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("support.space:UNet", "--batch", "support.space:ocean", "--space", "rows=2", *BY_LATITUDE),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("support.space:Pooled", "--batch", "support.space:fields_of_classes", "--space", "rows=2"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["rows=3", "dp2 and rows=2", "classes"],
)
def test_a_model_that_is_accused(capfd, arguments):
    """A step that weights latitudes has all of them on each rank: it gets the whole output."""
    code, out, err = verify(capfd, *arguments)
    assert code == 0, out + err
    assert "dim 2 of the input" in out
    assert "\nsame: " in out


def test_a_gradient_that_stays_on_its_rank(capfd, monkeypatch):
    """A norm whose sums go over all ranks, and whose backward does not: the loss is right."""
    # The ranks are forked from here.
    monkeypatch.setattr(GlobalSum, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))
    code, out, _ = verify(capfd, "support.space:Net", "--batch", "support.space:fields", "--space", "rows=2")
    assert code == 1
    assert "first difference: gradient of " in out


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--space", "columns=2"), "columns=2"),
        (("--space", "rows"), "rows=2"),
        (("--space", "rows=1"), "rows=1"),
        (("--space", "rows=40", "--mesh", "dp2"), "80 ranks"),
        (("--space", "rows=2", "--mesh", "tp2"), "tp2"),
        (("--space", "rows=2", "--write", "plan.py"), "--write"),
    ],
)
def test_a_flag_without_meaning(capfd, arguments, fragment):
    code, out, err = verify(capfd, "support.space:Net", "--batch", "support.space:fields", *arguments)
    assert code == 2
    assert fragment in err
    assert err.count("\n") == 1
    assert not out
