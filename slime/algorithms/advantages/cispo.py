"""CISPO (MiniMax-M1, arXiv:2506.13585): the advantages of GRPO, with a clipped weight as policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.advantages.grpo import GroupRelative


@ESTIMATORS.register("cispo")
@dataclass(frozen=True, kw_only=True)
class CispoAdvantages(GroupRelative):
    """`GroupRelative`; the policy loss is what differs."""

    default_policy_loss: ClassVar[str] = "cispo"
