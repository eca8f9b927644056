"""SAPO (Gao et al. 2025, arXiv:2511.20347): the advantages of GRPO, with a soft gate as policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.advantages.grpo import GroupRelative


@ESTIMATORS.register("sapo")
@dataclass(frozen=True, kw_only=True)
class SapoAdvantages(GroupRelative):
    """`GroupRelative`; the policy loss is what differs."""

    default_policy_loss: ClassVar[str] = "sapo"
