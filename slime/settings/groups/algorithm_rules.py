"""What the algorithm's settings cannot mean together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args


def kl_is_in_one_place(args: Args) -> str | None:
    """In the reward or in the loss."""
    if args.kl_coef and args.kl_loss_coef:
        return (
            f"got kl_coef {args.kl_coef} with kl_loss_coef {args.kl_loss_coef}, which would hold the policy to the "
            "reference twice; give one of them"
        )
    return None


def kl_loss_has_a_gradient(args: Args) -> str | None:
    """k1 is the log-ratio itself: the expected gradient of it is zero, whatever the distance to the reference."""
    if not args.use_kl_loss or args.kl_loss_coef == 0 or args.kl_loss_type != "k1" or args.use_unbiased_kl:
        return None
    return (
        f"got kl_loss_type k1 with kl_loss_coef {args.kl_loss_coef}: as a loss its expected gradient is zero, so "
        "nothing holds the policy to the reference; use another, or add --use-unbiased-kl"
    )


def aggregation_is_said_once(args: Args) -> str | None:
    """The public switch and the setting do not contradict each other."""
    if not args.calculate_per_token_loss or args.loss_aggregation == "token_mean":
        return None
    return f"got --calculate-per-token-loss with --loss-aggregation {args.loss_aggregation}; give one of them"


def observations_have_a_meaning(args: Args) -> str | None:
    """GAE bootstraps over observations or through them; there is no reset."""
    if args.advantage_estimator == "ppo" and args.observation_returns == "reset":
        return "got observation_returns reset with ppo; give skip or through"
    return None


def deviation_is_said_once(args: Args) -> str | None:
    """Two settings say whether group rewards are divided."""
    both = args.was_given("grpo_std_normalization") and args.was_given("advantage_scale")
    if not both or args.grpo_std_normalization == (args.advantage_scale != "none"):
        return None
    return (
        f"got grpo_std_normalization {args.grpo_std_normalization} with advantage_scale {args.advantage_scale}, "
        "which says the contrary; give one of them"
    )


RULES: tuple[Rule, ...] = (
    kl_is_in_one_place,
    kl_loss_has_a_gradient,
    aggregation_is_said_once,
    observations_have_a_meaning,
    deviation_is_said_once,
)
