"""Losses of lightly over the images of all ranks. Only their files are imported: its packages import torchvision."""

from unittest.mock import patch

from files_alone import skip_init
from torch import cat, manual_seed
from two_views import make_batch, make_model, parallelize  # noqa: F401

skip_init("lightly", "lightly.loss", "lightly.models", "lightly.models.modules", "lightly.models.utils")


def contrast(model, batch, mesh):
    from lightly.loss.ntx_ent_loss import NTXentLoss

    return NTXentLoss(gather_distributed=mesh is not None)(model(batch[0]), model(batch[1]))


def barlow_twins(model, batch, mesh):
    from lightly.loss import barlow_twins_loss

    own = barlow_twins_loss._normalize

    def normalize(z):
        """One device takes means and variances of each half, as each rank does."""
        return own(z) if mesh else cat([own(half) for half in z.chunk(2)])

    with patch.object(barlow_twins_loss, "_normalize", normalize):
        loss = barlow_twins_loss.BarlowTwinsLoss(gather_distributed=mesh is not None)
        return loss(model(batch[0]), model(batch[1]))


def gaussian(model, batch, mesh):
    from lightly.loss.lejepa_loss import SIGReg

    manual_seed(0)
    return SIGReg(gather_distributed=mesh is not None)(model(batch[0]))


def alone(model, batch):
    """The control: the loss has no term of two images."""
    from lightly.loss.negative_cosine_similarity import NegativeCosineSimilarity

    return NegativeCosineSimilarity()(model(batch[0]), model(batch[1]))
