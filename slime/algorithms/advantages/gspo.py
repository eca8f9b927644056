"""GSPO (Zheng et al. 2025, arXiv:2507.18071): the advantages of GRPO, with the policy loss of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.advantages.grpo import GroupRelative


@ESTIMATORS.register("gspo")
@dataclass(frozen=True, kw_only=True)
class GspoAdvantages(GroupRelative):
    """`GroupRelative`; the policy loss is what differs."""

    default_policy_loss: ClassVar[str] = "gspo"
