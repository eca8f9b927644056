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


def aggregation_is_said_once(args: Args) -> str | None:
    """The public switch and the setting do not contradict each other."""
    if not args.calculate_per_token_loss or args.loss_aggregation == "token_mean":
        return None
    return f"got --calculate-per-token-loss with --loss-aggregation {args.loss_aggregation}; give one of them"


RULES: tuple[Rule, ...] = (
    kl_is_in_one_place,
    aggregation_is_said_once,
)
