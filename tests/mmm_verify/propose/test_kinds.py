"""Kinds of modules that are no pair of plain matrices: the plan that is found is right, and what does not divide is
refused with the number."""

import pytest
import torch

from mmm_verify.propose.code import Axes, load_code
from mmm_verify.propose.find import find_plan, propose
from mmm_verify.run import verify_subject
from mmm_verify.subject import make_subject
from support import propose_models as models
from support.propose_models import Decoder, floats, images, tokens


def signals():
    return torch.randn(4, 6, 12)


def decoder(attention):
    return lambda: Decoder(attention)


# The model, its batch, and the style that has to be in the plan.
KINDS = {
    "few changes by heads": (decoder(models.FewChangesByHeads), tokens, "num_heads //="),
    "norms over all heads": (decoder(models.NormsOverAll), tokens, "GatheredChannels()"),
    "norm of a part of a fused matrix": (decoder(models.NormOverAll), tokens, "GatheredChannels()"),
    "attention": (models.PyTorchAttention, floats, "ShardedAttention()"),
    "convolutions": (models.UNet, images, 'ShardedModule({"weight": 1}, once=["bias"], inputs="own")'),
    "gated convolutions": (models.GatedConvolutions, signals, "(0, ((8, 2), (8, 2)))"),
}


def proven(model_fn, batch_fn, mesh):
    plan = find_plan([make_subject(model_fn, None, batch_fn, None, mesh)], "test", 60.0)
    subject = make_subject(model_fn, load_code(plan.code, None), batch_fn, None, mesh)
    return plan, verify_subject(subject)


# The others in `test_with_fsdp`.
QUICK = ["few changes by heads", "norms over all heads", "attention", "convolutions"]


@pytest.mark.parametrize("kind", QUICK)
def test_a_plan_is_found_and_right(kind):
    model_fn, batch_fn, style = KINDS[kind]
    plan, verdict = proven(model_fn, batch_fn, "tp2")
    assert verdict.same, str(verdict)
    assert style in " ".join(plan.code.split())
    assert not plan.tensor.refused


def test_a_trial_leaves_each_module_its_class_s_forward():
    """Norms whose channels are gathered stood in for themselves afterwards, with a forward of their own."""
    model = Decoder(models.NormsOverAll)
    proposal = propose(make_subject(lambda: model, None, tokens, None, "dp2"), "test", Axes(("dp",), "tp"), 2)
    assert any(group.gathered for group in proposal.tensor.groups)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_with_fsdp(kind):
    model_fn, batch_fn, style = KINDS[kind]
    plan, verdict = proven(model_fn, batch_fn, "dp2,tp2")
    assert verdict.same, str(verdict)
    assert style in " ".join(plan.code.split())


@pytest.mark.parametrize(
    ("model_fn", "batch_fn", "n_ranks", "says"),
    [
        (models.PyTorchAttention, floats, 3, "it has 4 heads, which do not divide by 3"),
        (lambda: models.UNet(width=6), images, 4, "bottleneck.0 gives 6 channels, which do not divide by 4"),
        (decoder(models.NormsOverAll), tokens, 3, "gives 16 channels, which do not divide by 3"),
    ],
    ids=["attention", "convolutions", "norms"],
)
def test_what_does_not_divide_is_refused_with_the_number(model_fn, batch_fn, n_ranks, says):
    subject = make_subject(model_fn, None, batch_fn, None, "dp2")
    proposal = propose(subject, "test", Axes(("dp",), "tp"), n_ranks)
    assert says in " ".join(str(proposal).split())


@pytest.mark.parametrize(
    ("model_fn", "batch_fn", "says"),
    [
        (models.Experts, floats, "replicated mixed.down: a parameter of Mixed itself, in no matrix module"),
        (decoder(models.Sinks), tokens, "layers.0.attention.sinks is a parameter of layers.0.attention itself"),
    ],
    ids=["experts in one parameter", "a parameter of each head"],
)
def test_what_stays_replicated_is_said(model_fn, batch_fn, says):
    """Each rank computes all of it, which is right: only the report shows that nothing is saved there."""
    plan, verdict = proven(model_fn, batch_fn, "tp2")
    assert verdict.same, str(verdict)
    assert says in " ".join(str(plan).split())
    assert "mixed" not in plan.code
    assert ".attention" not in plan.code
