"""Generation: how many prompts and samples per step, how they are sampled, how long the loop runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import derived


@dataclass(frozen=True, kw_only=True)
class RolloutArgs:
    """Generation of the samples of one step, and the length of the loop."""

    hf_checkpoint: str = ""
    """HF model folder: architecture, initial weights, tokenizer. Required."""
    num_rollout: int = derived()
    """Number of steps of the loop; 0 evaluates only. Required unless --num-epoch is given."""
    num_epoch: int | None = None
    """Passes over the prompt data; gives num_rollout = num_epoch * (rows // rollout_batch_size)."""
    start_rollout_id: int | None = None
    """First step of the loop. Default: the one after the loaded checkpoint, else 0."""
    rollout_batch_size: int = derived()
    """Prompts per step. Required."""
    n_samples_per_prompt: int = 1
    """Executions (samples) per prompt."""
    over_sampling_batch_size: int = derived()
    """Prompts fetched per submission round; more than rollout_batch_size leaves room for filters."""
    rollout_temperature: float = 1.0
    """Sampling temperature; the trainer divides the logits by the same number."""
    rollout_top_p: float = 1.0
    """TopPSet sampling. Only 1.0 can be trained on: the trainer's log-probs are over the whole vocabulary."""
    rollout_top_k: int = -1
    """Top-k sampling, -1 is off. Only -1 can be trained on, for the same reason."""
    rollout_max_response_len: int = 1024
    """Most tokens that one sample may generate."""
    rollout_max_context_len: int | None = None
    """Most tokens of prompt and response together."""
    rollout_max_prompt_len: int | None = derived()
    """Longer prompts are filtered out when the data is read. Default: rollout_max_context_len - 1 if that is given."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text (never out of the trained ids)."""
    rollout_stop: tuple[str, ...] | None = None
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response."""
    rollout_shuffle: bool = False
    """Shuffle the prompts anew in each epoch, by rollout_seed + epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle and, where the engine samples by seed, of sampling."""
    partial_rollout: bool = False
    """Keep the tokens of samples that the end of a step interrupts, and continue them later."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Train only the tokens that the newest weights sampled in a continued sample."""
    update_weights_interval: int = 1
    """Steps between weight syncs (train_async.py only)."""
    rollout_schedule: str = derived(chosen_from="slime.rollout.schedules:SCHEDULES")
    """When groups are started and which are trained: step, fully_async, function, or an import path of a class of yours
    (see the documentation of customization). Default: fully_async with fully_async, function where
    rollout_function_path names one of its own, otherwise step."""
    fully_async: bool = False
    """Generate without pause, also while weights are synced: a worker keeps groups running, and each step trains the
    oldest finished ones (train_async.py only). Default: whether rollout_schedule generates all the time, as the one
    that rollout_function_path slime.rollout.fully_async.generate_rollout_fully_async means."""
    max_groups_in_flight: int | None = derived()
    """Groups that the worker of fully_async has running or finished and waiting, at most. Default: 2 *
    rollout_batch_size, half of that if max_weight_staleness is 0."""
    max_weight_staleness: int | None = derived()
    """No trained sample holds a token sampled by weights more than so many versions (trained steps) before those that
    are trained; groups with older ones start over. Finished groups beyond a batch are then kept. Default: 2 with
    fully_async; otherwise a step trains what was sampled in it, but for what partial_rollout continues."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = "abort"
    """What a weight sync does to requests under way (fully_async): abort ends them, and they are sent again with their
    tokens; retract and in_place let them go on under the new weights, retract after reading all tokens anew, in_place
    with the keys and values of the old weights. The weight sync before a checkpoint always ends them, so that it holds
    their tokens."""
    rollout_global_timeout_s: float | None = None
    """Limit of one whole generation phase, in seconds."""
