"""NT-Xent of stable-pretraining: are the images of all ranks negatives? Only its files are imported."""

import sys

from files_alone import skip_init
from two_views import make_batch, make_model, parallelize  # noqa: F401

skip_init("stable_pretraining", "stable_pretraining.losses", "stable_pretraining.utils")
from stable_pretraining.utils import distributed  # noqa: E402

# as the package's __init__.py has them
vars(sys.modules["stable_pretraining.utils"]).update(vars(distributed))
from stable_pretraining.losses.joint_embedding import BYOLLoss, NTXEntLoss  # noqa: E402


def contrast(model, batch):
    return NTXEntLoss()(model(batch[0]), model(batch[1]))


def alone(model, batch):
    """The control: the loss has no term of two images."""
    return BYOLLoss()(model(batch[0]), model(batch[1]))
