"""Evaluation on held-out data: when, on what, sampled how."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import derived


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Evaluation; every setting that is left out is the rollout's."""

    eval_interval: int | None = None
    """Steps between evaluations; none evaluates never."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""
    eval_prompt_data: tuple[str, ...] | None = None
    """Data sets as pairs: NAME FILE [NAME FILE ...]."""
    eval_config: str | None = None
    """YAML file with datasets that have settings of their own, in place of --eval-prompt-data."""
    eval_input_key: str = derived()
    """Column with the prompt. Default: input_key."""
    eval_label_key: str | None = derived()
    """Column with the answer. Default: label_key."""
    eval_tool_key: str = derived()
    """Column with the tools. Default: tool_key."""
    eval_reward_key: str | None = derived()
    """Key of a dict reward. Default: reward_key."""
    n_samples_per_eval_prompt: int = 1
    """Samples per evaluation prompt."""
    eval_temperature: float = derived()
    """Temperature; 0 is greedy. Default: rollout_temperature."""
    eval_top_p: float = derived()
    """TopPSet sampling. Default: rollout_top_p."""
    eval_top_k: int = derived()
    """Top-k sampling. Default: rollout_top_k."""
    eval_max_response_len: int = derived()
    """Most tokens of a response. Default: rollout_max_response_len."""
    eval_max_prompt_len: int | None = derived()
    """Longer prompts are filtered out. Default: rollout_max_prompt_len."""
    eval_min_new_tokens: int | None = None
    """Fewest tokens of a response."""
