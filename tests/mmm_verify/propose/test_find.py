"""What is found for a model, and what is refused, with its reason."""

from mmm_verify.propose.code import Axes
from mmm_verify.propose.find import propose
from mmm_verify.subject import make_subject
from support import propose_models as models
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


def test_a_fused_matrix_and_its_number_of_heads():
    group = group_of(decoder(models.Heads), "layers.1.attention.out")
    assert group.producers == {"layers.1.attention.qkv": ((16, 2), (16, 2), (16, 2))}
    assert group.fixes == [("layers.1.attention", "num_heads")]


def test_keys_that_all_heads_share():
    group = group_of(decoder(models.MultiQuery), "layers.0.attention.out")
    assert group.producers == {"layers.0.attention.qkv": ((16, 2), (8, 1))}


def test_a_norm_of_each_head_sees_a_rank_s_heads():
    group = group_of(decoder(models.NormOverHead), "layers.0.attention.out")
    assert group.between == ["layers.0.attention.q_norm"]


def test_a_norm_over_all_heads_is_named():
    proposal = decoder(models.NormOverAll)
    why = refusal_of(proposal, "layers.0.attention.out")
    assert "layers.0.attention.q_norm (native_layer_norm)" in why
    assert len(proposal.tensor.groups) == 2  # the MLPs
    assert "native_layer_norm" in str(proposal)


def test_a_number_of_heads_in_the_code_is_named_by_its_line():
    why = refusal_of(decoder(models.FixedHeads), "layers.0.attention.out")
    assert "propose_models.py:" in why
    assert "t.view(*x.shape[:2], heads, self.head_dim)" in why
    assert "is invalid for input of size" in why


def test_what_else_a_module_returns_is_followed():
    why = refusal_of(found(models.Shares, floats), "first.out")
    assert "first also returns a tensor of (1, 4, 1, 1), which would be (1, 2, 1, 1), and others take it" in why


def test_a_matrix_whose_output_goes_elsewhere_too():
    assert found(models.Gated, floats).tensor.groups == []


def test_a_matrix_that_is_called_in_other_company():
    proposal = found(models.SharedRows, floats)
    assert proposal.tensor.groups == []
    assert refusal_of(proposal, "mlp.down") == "mlp.down is called 2 times a forward, others of the group not"


def test_matrices_that_are_tied():
    proposal = found(models.TiedUps, floats)
    assert proposal.tensor.groups == []
    assert refusal_of(proposal, "mlps.0.down") == "the weight of mlps.0.up is that of mlps.1.up.weight too"


def test_a_weight_that_is_used_outside_of_its_module():
    proposal = found(lambda: models.WeightInFunction(models.Heads), tokens)
    assert proposal.units.root["embedding"] == "weight is used outside of its forward too"


def test_ties_go_with_the_root():
    proposal = decoder(models.Heads, tie=True)
    assert proposal.units.blocks == ["layers.0", "layers.1"]
    assert proposal.units.large == []
    assert "tied to" in proposal.units.root["embedding"]
    assert proposal.tensor.replicated == {"head": "tied to embedding.weight"}
    assert proposal.cuts.shared == ["embedding.weight"]


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


def test_matrices_that_are_used_in_a_function():
    proposal = found(models.encoder, floats)
    assert [group.consumers for group in proposal.tensor.groups] == [["layers.0.linear2"], ["layers.1.linear2"]]
    why = proposal.tensor.replicated["layers.*.self_attn.out_proj"]
    assert "layers.*.self_attn" in why


def test_cuts_and_what_goes_past_them():
    assert decoder(models.Heads).cuts.after == ["layers.0"]
    assert found(models.Skips, floats).cuts.refused == {"blocks.1": "the output of blocks.0 goes past it as well"}
