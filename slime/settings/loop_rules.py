"""The rules of the two loops, train.py and train_async.py, and of what generates while they train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.core.registry import load_object
from slime.settings.conditions import fine_tunes
from slime.settings.group import Rule
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC
from slime.settings.groups.rollout import SCHEDULES

if TYPE_CHECKING:
    from slime.settings.args import Args


def sync_rules() -> tuple[Rule, ...]:
    """What train.py refuses on top."""
    return (*_BOTH, _sync_trainer_syncs_every_step, _sync_trains_what_sampled, _sync_waits_for_its_batch)


def _sync_trainer_syncs_every_step(args: Args) -> str | None:
    if args.update_weights_interval == 1:
        return None
    return (
        f"got update_weights_interval {args.update_weights_interval} with train.py, which syncs weights after every "
        "step; drop it or use train_async.py"
    )


def _sync_trains_what_sampled(args: Args) -> str | None:
    if not args.keep_old_actor:
        return None
    return (
        "got --keep-old-actor with train.py, which trains every batch on the weights that sampled it; "
        "drop it or use train_async.py"
    )


def async_rules() -> tuple[Rule, ...]:
    """What train_async.py refuses on top."""
    return (*_BOTH, _async_is_not_colocated, _one_step_off_has_no_bound)


def _async_is_not_colocated(args: Args) -> str | None:
    if not args.colocate:
        return None
    return (
        "got --colocate with train_async.py, which generates while it trains; both need the GPU: "
        "drop --colocate or use train.py"
    )


def _sync_waits_for_its_batch(args: Args) -> str | None:
    if not args.fully_async:
        return None
    return "got --fully-async with train.py, which generates and trains in turn; use train_async.py"


def _one_step_off_has_no_bound(args: Args) -> str | None:
    if args.fully_async or args.max_weight_staleness is None:
        return None
    return (
        "got --max-weight-staleness with train_async.py, which takes a batch before the weights that it will train "
        "exist; add --fully-async or use train.py"
    )


def _worker_is_not_refused(args: Args) -> str | None:
    if args.rollout_function_path != FULLY_ASYNC:
        return None
    return "got --no-fully-async with --rollout-function-path of its worker; drop one of the two"


def _one_schedule(args: Args) -> str | None:
    name = args.rollout_schedule
    if load_object(SCHEDULES).get(name).continuous != args.fully_async:
        switch = "--fully-async" if args.fully_async else "--no-fully-async"
        return f"got --rollout-schedule {name} and {switch} (or the function that means it); drop one of the two"
    if name != "function" and args.rollout_function_path != DEFAULT_ROLLOUT:
        return (
            f"got --rollout-schedule {name} with --rollout-function-path {args.rollout_function_path}, which only the "
            "schedule function calls; drop one of the two"
        )
    return None


def _worker_has_its_own_ways(args: Args) -> str | None:
    if not args.fully_async:
        return None
    wrong = [n for n in ("rollout_function_path", "over_sampling_batch_size") if args.was_given(n)]
    if not wrong and not fine_tunes(args):
        return None
    return (
        f"got --fully-async with {' and '.join(wrong) or 'loss_type sft_loss'}: its worker is the rollout function "
        "and keeps max_groups_in_flight groups; drop one of the two"
    )


def _batches_of_a_worker_mix_versions(args: Args) -> str | None:
    if not (args.fully_async and args.keep_old_actor):
        return None
    return (
        "got --keep-old-actor with --fully-async, whose batches were sampled by several weights, of which one copy "
        "is kept; use --use-tis or --use-rollout-logprobs"
    )


def _prompts_are_read_at_once(args: Args) -> str | None:
    if args.pause_generation_mode != "in_place" or args.sglang["chunked_prefill_size"] == -1:
        return None
    return (
        "got --sglang-chunked-prefill-size with --pause-generation-mode in_place: a prompt read by several weights "
        "would not show in the versions of its sample; drop it or use retract"
    )


def _bounds_are_possible(args: Args) -> str | None:
    bound, most = args.max_weight_staleness, args.max_groups_in_flight
    if bound is not None and bound < 0:
        return f"got max_weight_staleness {bound}; 0 trains only what the newest weights sampled, leave it out for none"
    if most is not None and most < args.rollout_batch_size:
        return (
            f"got max_groups_in_flight {most} below rollout_batch_size {args.rollout_batch_size}: a batch would "
            "never be full; raise it"
        )
    if args.fully_async and bound is not None and bound < (interval := args.update_weights_interval) - 1:
        return (
            f"got max_weight_staleness {bound} with update_weights_interval {interval}: before a weight sync "
            f"engines are {interval - 1} versions behind and a step would wait for ever; raise it"
        )
    return None


_BOTH: tuple[Rule, ...] = (
    _worker_is_not_refused,
    _one_schedule,
    _worker_has_its_own_ways,
    _bounds_are_possible,
    _prompts_are_read_at_once,
    _batches_of_a_worker_mix_versions,
)
