"""Flags of an example that routes tokens to experts."""

from __future__ import annotations

from dataclasses import dataclass

from mmm.trainer.config.run import check_counts
from mmm.trainer.config.training import ExpertOptions


@dataclass(frozen=True, kw_only=True)
class RoutedOptions(ExpertOptions):
    """Routed experts, in place of feed-forward layers."""

    n_experts: int = 8
    """Experts in each layer."""

    def check(self) -> None:
        check_counts(n_experts=self.n_experts)
        super().check()


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A group of flags; that of the last base stands first in ``--help``."""

    experts: RoutedOptions = RoutedOptions()
