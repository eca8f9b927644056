"""How new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.core.loading import load_object
from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.settings.fields import UNSET, derived, opt

TRANSPORTS = "slime.weights.transports:TRANSPORTS"
"""The registry of transports, which stands above the settings."""


def _separate(s: Any) -> bool:
    """Whether an engine may be where it cannot see the trainer's memory."""
    if s.rollout_external_engine_addrs:
        return True
    if s.device == "cuda":
        return policy_has_own_gpus(s)
    if s.colocate:
        return s.actor_num_nodes > 1 or (s.ray_address is not None and policy_has_own_gpus(s))
    return s.ray_address is not None


def _of_both_kinds(s: Any) -> bool:
    return bool(s.device == "cuda" and policy_shares_gpus(s) and policy_has_own_gpus(s))


def _transport(s: Any) -> str:
    if _of_both_kinds(s):
        return "mixed"
    return "distributed" if _separate(s) else "tensor"


def _why(s: Any) -> str:
    if _of_both_kinds(s):
        return "some engines share GPUs with the trainer, others have their own"
    if not _separate(s):
        return "trainer and engines share memory"
    if s.rollout_external_engine_addrs:
        return "somebody else started the engines"
    return "trainer and engines have GPUs of their own" if s.device == "cuda" else "an engine may be on another host"


def _hands_memory_over(s: Any) -> bool:
    return bool(s.offload_train and s.offload_rollout and s.update_weight_transport in ("tensor", "mixed"))


def _one_name(value: Any) -> Any:
    """The first name of a registered transport; a path stays as it is."""
    if value == "auto":
        return UNSET
    known = load_object(TRANSPORTS)
    return known.get(value).name if value in known else value


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """Weight sync. Every sync is verified; there is no switch for that."""

    update_weight_transport: str = derived(
        _transport,
        _why,
        chosen_from=TRANSPORTS,
        canonical=_one_name,
    )
    """tensor: shared memory, on cuda only under --colocate; distributed (alias nccl): a process group, gloo or NCCL;
    disk: a shared folder; mixed: tensor for the engines on GPUs of training ranks, distributed for the others; or the
    import path of a transport of your own. auto, by where the engines of the policy are: mixed on cuda where
    there are both kinds, distributed on cuda where all have GPUs of their own and where one may be on another host,
    else tensor."""
    update_weight_buffer_size: int = derived(
        lambda s: 2 * 1024**3 if s.device == "cuda" and _hands_memory_over(s) else None,
        "little else is on the GPU during a weight sync, and each bucket costs time",
        default=512 * 1024**2,
        ge=1,
    )
    """Bytes per bucket."""
    weight_sync_timeout_s: float = opt(300.0, gt=0)
    """Limit of one weight sync, in seconds."""
