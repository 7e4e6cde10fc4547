"""What the CNN sends over tp. It has no layers that are alike, and is not planned."""

from __future__ import annotations

from mmm.models.cnn.model import CNNConfig
from mmm.models.costs import Costs, Held, KeptActivations, Setting
from mmm.parallel.collective_bytes import factor


class CNNCosts(Costs):
    """Of `mmm.models.cnn.model.CNN`."""

    planned = False

    def kept(self, config: CNNConfig, setting: Setting) -> KeptActivations:
        raise ValueError("no formula for what a CNN's layers keep and pass on")

    def pairs(self, config: CNNConfig) -> int:
        return 1

    def sent_over_tp(self, config: CNNConfig, setting: Setting, held: Held) -> float:
        widths = config.features * ("fc1" in held.modules) + config.classes * ("fc2" in held.modules)
        return factor("all_reduce", setting.layout.tp) * setting.batch * widths * setting.compute
