"""Pipelines together with what repeats or divides the work of a stage: checkpointing, tiles, the loss in chunks."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.transformer import Transformer
from mmm.parallel import Layout, build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.runtime.device import Precision
from support import reference, vision

CPU = torch.device("cpu")
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
SPLIT = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits)
LAYOUT = Layout(pp=2, dp_shard=1)


@pytest.mark.parametrize("schedule", SPLIT)
def test_selective_checkpointing_is_refused_where_backward_is_split(schedule):
    with torch.device("meta"):
        model, sample = Transformer(reference.CONFIG), torch.zeros(8, reference.SEQ, dtype=torch.int64)
    techniques = Techniques(schedule=schedule, microbatches=4, checkpointing="selective")
    with pytest.raises(LayoutError, match=rf"{schedule}"):
        partition_model(model, transformer_plan(), LAYOUT, techniques, sample)


def first_gradients(rank, schedule):
    """Of one step of the ViT in bf16 mixed precision, as one micro-batch where the schedule takes that."""
    layout, plan = Layout(pp=2, dp_shard=2), vit_plan()
    techniques = Techniques(schedule=schedule)
    images, classes = vision.batch("vit", 0)
    size = len(images) // layout.dp
    first = layout.dp_coordinate(rank.rank) * size
    images, classes = images[first : first + size].float(), classes[first : first + size]
    with torch.device("meta"):
        model = vision.build("vit")
    partition = partition_model(model, plan, layout, techniques, images.to("meta"))
    made = ParallelModel(
        model, plan, build_mesh(layout, "cpu"), BF16, techniques, partition, device=CPU, seed=vision.SEED
    )
    made.step(images, classes, vision.GLOBAL_BATCH)
    return {name: parameter.grad.full_tensor() for name, parameter in made.named_parameters()}


def test_gradients_of_a_split_backward_are_summed_in_one_dtype(run_on_ranks):
    """In mixed precision over dp, whichever of a unit's gradients come with the input's and which come later."""
    _, _, gradients = vision.train("vit", "sgd")
    ranks = run_on_ranks(first_gradients, 4, "ZBVZeroBubble")
    assert {name for of_rank in ranks for name in of_rank} == gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in ((name, each) for of_rank in ranks for name, each in of_rank.items()):
        assert gradient.dtype == torch.float32
        off = ((gradient - gradients[name]).norm() / max(gradients[name].norm(), 1e-3 * largest)).item()
        assert off < 0.05, f"the gradient of {name} is {off:.1%} off"
