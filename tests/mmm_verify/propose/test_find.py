"""What is found for a model, and what is refused, with its reason."""

import re
import sys

import pytest
from torch import nn

from mmm.torch_private.faults import DOTTED
from mmm_lab.cli.main import main
from mmm_verify.errors import ConfigError
from mmm_verify.propose.code import Axes, load_code
from mmm_verify.propose.find import find_plan, propose
from mmm_verify.run import verify_subject
from mmm_verify.subject import make_subject
from support import propose_models as models
from support.faults import skipped_by
from support.propose_models import Decoder, floats, images, tokens


def found(model_fn, batch_fn, parts=2):
    subject = make_subject(model_fn, None, batch_fn, None, "dp2")
    return propose(subject, "test", Axes(("dp",), "tp"), parts)


def decoder(attention, **options):
    return found(lambda: Decoder(attention, **options), tokens)


def group_of(proposal, consumer):
    return next(group for group in proposal.tensor.groups if group.consumers == [consumer])


def refusal_of(proposal, consumer):
    return next(group.refused for group in proposal.tensor.refused if group.consumers == [consumer])


def test_grouped_heads():
    proposal = found(models.llama, floats)
    group = group_of(proposal, "0.attention.wo")
    assert group.producers == {
        "0.attention.wq": ((16, 2),),
        "0.attention.wk": ((8, 2),),
        "0.attention.wv": ((8, 2),),
    }
    assert group_of(proposal, "1.feed_forward.w2").producers.keys() == {"1.feed_forward.w1", "1.feed_forward.w3"}
    assert len(proposal.tensor.groups) == 4
    assert not proposal.tensor.refused


def test_fused_matrices_and_norms_between_them():
    fused = group_of(decoder(models.Heads), "layers.1.attention.out")
    # Sections of 16 rows, each cut in two.
    assert fused.producers == {"layers.1.attention.qkv": ((16, 2), (16, 2), (16, 2))}
    assert fused.fixes == [("layers.1.attention", "num_heads")]
    shared_keys = group_of(decoder(models.MultiQuery), "layers.0.attention.out")
    # The one head of keys and values is on both ranks.
    assert shared_keys.producers == {"layers.0.attention.qkv": ((16, 2), (8, 1))}
    normed = group_of(decoder(models.NormOverHead), "layers.0.attention.out")
    # It sees a rank's heads.
    assert normed.between == ["layers.0.attention.q_norm"]


@pytest.mark.parametrize(
    ("proposal", "groups", "consumer", "says"),
    [
        (
            lambda: decoder(models.MeanOverAll),
            2,
            "layers.0.attention.out",
            "layers.0.attention (mul)",
        ),
        (lambda: decoder(models.FixedHeads), 2, "layers.0.attention.out", "t.view(*x.shape[:2], heads, self.head_dim)"),
        (
            lambda: found(models.Shares, floats),
            0,
            "first.out",
            "first also returns a tensor of (1, 4, 1, 1), which would be (1, 2, 1, 1), and others take it",
        ),
        (
            lambda: found(models.SharedRows, floats),
            0,
            "mlp.down",
            "is called 2 times a forward, others of the group not",
        ),
        (lambda: found(models.TiedUps, floats), 0, "mlps.0.down", "mlps.0.up is that of mlps.1.up.weight too"),
        # The first matrix's output goes elsewhere too.
        (lambda: found(models.Gated, floats), 0, "", ""),
    ],
)
def test_what_is_refused_and_why(proposal, groups, consumer, says):
    made = proposal()
    assert len(made.tensor.groups) == groups
    if consumer:
        assert says in refusal_of(made, consumer)
        assert says in " ".join(str(made).split())


def test_a_weight_that_is_used_outside_of_its_module():
    proposal = found(lambda: models.WeightInFunction(models.Heads), tokens)
    assert proposal.units.root["embedding"] == "weight is used outside of its forward too"


def test_ties_go_with_the_root():
    proposal = decoder(models.Heads, tie=True)
    assert proposal.units.blocks == ["layers.0", "layers.1"]
    assert proposal.units.large == []
    assert "tied to" in proposal.units.root["embedding"]
    assert proposal.tensor.replicated == {"head": "tied to embedding.weight"}


def test_large_modules_are_units():
    proposal = decoder(models.Heads, layers=1)
    assert proposal.units.large == ["embedding", "head"]


def test_a_convolutional_net():
    proposal = found(models.ConvNet, images)
    assert proposal.units.batch_norms == ["features.0.1", "features.1.1"]
    assert proposal.tensor.groups == []
    assert "columns→rows  none" in str(proposal)
    assert "sync_batch_norm(model, dp)" in proposal.code
    assert "TENSOR" not in proposal.code


def test_a_norm_that_is_split_with_a_pair_is_named_once():
    """It was named for its weight, for its bias, and for what its forward counts by."""
    text = " ".join(str(found(models.UNet, images)).split())
    assert text.count("1 is split by channels with it (num_groups / 2)") == 1
    assert "1.weight" not in text
    assert "counts by" not in text


def test_matrices_that_are_used_in_a_function():
    proposal = found(models.UsesWeight, floats)
    assert not proposal.tensor.groups
    assert proposal.tensor.replicated["up"] == "it is not called: the model uses its weight, or nothing does"


def test_an_encoder_of_pytorch():
    """Its attention uses the matrix inside it in a function."""
    proposal = found(models.encoder, floats)
    assert [group.consumers for group in proposal.tensor.groups] == [["layers.0.linear2"], ["layers.1.linear2"]]
    assert proposal.tensor.attentions == ["layers.0.self_attn", "layers.1.self_attn"]


def proven(model_fn, batch_fn, mesh):
    """Find a plan, and verify it."""
    plan = find_plan([make_subject(model_fn, None, batch_fn, None, mesh)], "test", 60.0)
    subject = make_subject(model_fn, load_code(plan.code, None), batch_fn, None, mesh)
    return plan, verify_subject(subject)


def mixed():
    """A block of each kind."""
    model = Decoder(models.NormOverHead, tie=True)
    model.layers.append(models.Block(models.MultiQuery))
    return model


def test_every_kind_of_group_on_both_axes():
    """Fused matrices, a norm of each head, shared keys, outputs written in place, a tie."""
    plan, verdict = proven(mixed, tokens, "dp2,tp2")
    assert verdict.same, str(verdict)
    assert len(plan.tensor.groups) == 6
    columns = ("SectionedColwise((16, 2), (16, 2), (16, 2))", "SectionedColwise((16, 2), (8, 1))")
    for style in (*columns, "PartialGradient()", "OwnedRowwise()"):
        assert style in plan.code


def test_a_parameter_without_dims():
    """FSDP refuses to shard it."""
    plan, verdict = proven(models.Scaled, floats, "dp2")
    assert verdict.same, str(verdict)
    assert "ignored_params" in plan.code


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_fn", "batch_fn", "mesh"),
    [
        (models.llama, floats, "dp2,tp2"),
        # 2 heads of keys
        (models.llama, floats, "tp4"),
        (models.encoder, floats, "dp2,tp2"),
        (models.Skips, floats, "tp4"),
        (models.Shares, floats, "dp2"),
        (models.ConvNet, images, "dp2"),
        (models.NormsWithActivations, images, "dp2"),
        (lambda: nn.Linear(16, 4), floats, "dp2"),
    ],
    ids=[
        "grouped heads",
        "fewer of them than ranks",
        "encoder",
        "skips",
        "shares",
        "convolutions",
        "norms with activations",
        "one matrix",
    ],
)
def test_others(model_fn, batch_fn, mesh):
    _, verdict = proven(model_fn, batch_fn, mesh)
    assert verdict.same, str(verdict)


PROGRAM = """
import torch
from torch import nn

calls = []

def make_model():
    layer = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(layer(), layer())

def wants_sizes(dim, heads):
    return nn.Linear(dim, heads)

def lone():
    return nn.Sequential(nn.Linear(8, 8))

def raises():
    raise RuntimeError("no weights here")

def gives_a_number():
    return 3

def narrow():
    return torch.randn(4, 5)

class Drifts(nn.Linear):
    def forward(self, x):
        calls.append(1)
        return super().forward(x) * len(calls)

def drifts():
    return nn.Sequential(nn.Linear(8, 8), Drifts(8, 8))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "found_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("found_program", None)


@skipped_by(DOTTED)
def test_the_command_writes_what_it_takes(program, capsys):
    assert main(["verify", "found_program:make_model", "--mesh", "tp2", "--write", "plan.py"]) == 0
    out = capsys.readouterr().out
    assert "*: 0 → 2 (2 times)" in out
    assert re.search(r"^same: tp2", out, re.MULTILINE)
    for line in out.splitlines():
        assert len(line) <= 100
    code = (program / "plan.py").read_text()
    assert '"*.0": ColwiseParallel()' in code
    # PyTorch's styles are enough for this model.
    assert "from mmm" not in code
    sys.path.insert(0, str(program))
    sys.modules.pop("plan", None)
    assert main(["verify", "found_program:make_model", "--mesh", "tp2", "--parallelize", "plan:parallelize"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("found_program:raises", "RuntimeError"),
        ("found_program:wants_sizes", "missing 2"),
        ("found_program:gives_a_number", "nn.Module"),
        ("found_program:make_model --batch found_program:narrow", "mat1 and mat2"),
        ("found_program:make_model --mesh pp2", "a plan is found for data parallelism and one axis of tensor"),
        ("found_program:make_model --mesh tp2 tp4", "one plan is found for all meshes"),
        ("found_program:make_model --write no/where.py", "no/where.py"),
        ("os.path:resnet81", "os.path has no resnet81"),
        ("hf:config.json", "transformers is not installed: pip install transformers"),
        ("hf:", "write hf:config.json"),
        ("train.py", "or --program train.py"),
    ],
)
def test_what_cannot_be_used(arguments, says, program, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", *arguments.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]


def test_what_has_no_plan(program, capsys):
    assert main(["verify", "found_program:drifts", "--mesh", "dp2"]) == 2
    assert "not deterministic: 1 gives something else the second time" in capsys.readouterr().out
    assert main(["verify", "found_program:lone", "--mesh", "tp2"]) == 2
    assert "tp2" in capsys.readouterr().out


def test_a_plan_that_needs_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmm.parallel", None)
    with pytest.raises(ConfigError, match=r"mmm\.parallel.*not installed"):
        load_code("from mmm.parallel import PartialGradient\n", None)
