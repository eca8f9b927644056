"""Sampling parameters: from the settings to what the engine reads; a fresh dict for every request.

All of temperature, top_p and top_k are always sent: a missing one would be filled in from the checkpoint's
generation config or the engine's defaults, and the log-probs would belong to another distribution.
"""

from __future__ import annotations

from typing import Any

from slime.settings import Args
from slime.settings.eval_config import EvalDatasetConfig
from slime.settings.groups.rollout import RolloutSettings


def rollout_sampling_params(args: RolloutSettings) -> dict[str, Any]:
    """Parameters of training rollouts."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


def eval_sampling_params(dataset: EvalDatasetConfig) -> dict[str, Any]:
    """Parameters of one evaluation dataset. Temperature 0 is greedy."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_new_tokens",
        "repetition_penalty",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
    )
    given = {name: getattr(dataset, name) for name in names}
    params = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v is not None}
    return {**params, "max_new_tokens": dataset.max_response_len}


def seeded(args: Args, params: dict[str, Any], index: int) -> dict[str, Any]:
    """A copy for one execution; with its own seed where the engine samples by seed."""
    params = dict(params)
    if args.sglang.get("enable_deterministic_inference"):
        params["sampling_seed"] = (args.rollout_seed + index) % 2**31
    return params
