"""Conditions of several groups' settings: what a run has to compute for them to act."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.core.registry import load_object
from slime.core.topology import ServedModel
from slime.settings.fields import Need
from slime.settings.topology import topology_of

ESTIMATORS = "slime.algorithms.advantages:ESTIMATORS"
"""The registry of advantage estimators, which stands above the settings."""


def estimator_of(s: Any) -> Any:
    """The class of the advantage estimator. Raises `ConfigError` for a name that none has."""
    return load_object(ESTIMATORS).get(s.advantage_estimator)


def fine_tunes(s: Any) -> bool:
    """Whether the run learns from texts as they are: nothing is sampled, and there are no rewards."""
    return bool(s.loss_type == "sft_loss")


def minimises_policy_loss(s: Any) -> bool:
    """Whether the loss is slime's own for sampled tokens: the policy loss, a KL to the reference, an entropy bonus."""
    return bool(s.loss_type == "policy_loss")


def minimises_custom_loss(s: Any) -> bool:
    """Whether the loss is the user's function of sampled tokens."""
    return bool(s.loss_type == "custom_loss")


def computes_advantages(s: Any) -> bool:
    """Whether the run turns rewards into advantages."""
    return not fine_tunes(s) and bool(s.compute_advantages_and_returns)


def has_policy_term(s: Any) -> bool:
    """Whether slime's own policy loss is minimised, from advantages."""
    return minimises_policy_loss(s) and bool(s.compute_advantages_and_returns)


def has_kl(s: Any) -> bool:
    """Whether a KL to the reference is computed."""
    return bool(s.kl_coef) or (s.use_kl_loss and minimises_policy_loss(s))


def has_reference(s: Any) -> bool:
    """Whether log-probs of a reference are computed: for a KL, or for a custom loss that reads them."""
    return bool(s.kl_coef) or (s.use_kl_loss and not fine_tunes(s))


def lends_at_start(s: Any) -> bool:
    """Whether training ranks lend their GPUs to engines before these have ever taken memory. On a CPU nothing is lent:
    both have their own.
    """
    return bool(s.device == "cuda" and s.offload_train and not s.debug_train_only)


def shares_gpus(s: Any, model: ServedModel) -> bool:
    """Whether some engines of a model share GPUs (on a CPU: slots) with the trainer, to which they then lend them.

    With `--colocate` the first engines of the topology do, whatever they serve, until all GPUs of training are shared.
    """
    return any(begin < _num_shared(s) for begin, _ in _gpus_of(s, model))


def policy_shares_gpus(s: Any) -> bool:
    """Whether some engines of the policy share GPUs (on a CPU: slots) with the trainer."""
    policy = topology_of(s).policy
    return policy is not None and shares_gpus(s, policy)


def policy_has_own_gpus(s: Any) -> bool:
    """Whether some engines of the policy have GPUs (on a CPU: slots) where no training rank is."""
    policy = topology_of(s).policy
    return policy is not None and any(end > _num_shared(s) for _, end in _gpus_of(s, policy))


def _num_shared(s: Any) -> int:
    """GPUs that training shares."""
    return int(s.actor_num_nodes * s.actor_num_gpus_per_node) if s.colocate else 0


def _gpus_of(s: Any, wanted: ServedModel) -> Iterator[tuple[int, int]]:
    """For each group of a model that runs, its GPUs from where to where, in the order in which they are taken."""
    end = 0
    for model in topology_of(s).models:
        for group in model.groups:
            begin, end = end, end + group.num_gpus
            if model.name == wanted.name and group.runs:
                yield begin, end


_POLICY_TERM_TEXT = "the policy loss: loss_type policy_loss, without --disable-compute-advantages-and-returns"

ADVANTAGES = Need(
    computes_advantages,
    "advantages: loss_type policy_loss or custom_loss, without --disable-compute-advantages-and-returns",
)
OWN_ADVANTAGES = Need(
    lambda s: not s.custom_advantage_function_path, "an estimator; --custom-advantage-function-path replaces it"
)
POLICY_TERM = Need(has_policy_term, _POLICY_TERM_TEXT)
POLICY_LOSS = Need(minimises_policy_loss, "loss_type policy_loss")
SAMPLED_LOSS = Need(lambda s: not fine_tunes(s), "loss_type policy_loss or custom_loss")
CRITIC = Need(lambda s: estimator_of(s).needs_critic, "an advantage_estimator with a critic, as ppo")
KL = Need(has_kl, "--kl-coef, or --use-kl-loss with loss_type policy_loss")
KL_LOSS = Need(lambda s: s.use_kl_loss, "--use-kl-loss")
REFERENCE = Need(has_reference, "--use-kl-loss or --kl-coef")
ENGINE_LOG_PROBS = Need(
    lambda s: has_policy_term(s) or (minimises_policy_loss(s) and s.use_kl_loss and s.use_unbiased_kl),
    f"{_POLICY_TERM_TEXT}; or --use-unbiased-kl",
)
