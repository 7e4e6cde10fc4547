"""What a Swin costs a rank: as much as a ViT, and the masks of its shifted blocks."""

from __future__ import annotations

from dataclasses import replace

from mmm.models.costs import KeptActivations, Setting
from mmm.models.swin.model import SwinConfig
from mmm.models.vit.costs import ViTCosts


class SwinCosts(ViTCosts):
    """Costs of `mmm.models.swin.model.Swin`."""

    def kept(self, config: SwinConfig, setting: Setting) -> KeptActivations:  # type: ignore[override]
        as_vit = super().kept(config, setting)
        # A place has a number for each place of its window. Every second block has a mask: this is their mean.
        mask = setting.compute * config.window**2 / 2
        return replace(as_vit, none=as_vit.none + mask)
