"""What numbers of flags may be: the kinds of quantities that settings have, and the numbers of the engines' own flags.

A bound is wide: it stands where no machine of today comes, so that what lies beyond is a slip of the hand. The engines
say it late, in an assertion, or not at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """What a number may be; None means unbounded. With any bound the number has to be finite."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` is finite and inside; not-a-number is outside of everything."""
        if self == Range():
            return True
        return (
            math.isfinite(value)
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    @property
    def is_closed(self) -> bool:
        """Whether it is bounded on both sides."""
        return not (self.gt is None and self.ge is None) and not (self.lt is None and self.le is None)

    def text(self) -> str:
        """The range in words, after "must be"."""
        low = f"> {_plain(self.gt)}" if self.gt is not None else ""
        low = f"at least {_plain(self.ge)}" if self.ge is not None else low
        high = f"< {_plain(self.lt)}" if self.lt is not None else ""
        high = f"at most {_plain(self.le)}" if self.le is not None else high
        return " and ".join(part for part in (low, high) if part)

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, after "got VALUE, "; None where nothing is, or where it is not a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not math.isfinite(value):
            return "which is not a finite number"
        return None if self.holds(value) else f"which must be {self.text()}"


def _plain(bound: float) -> str:
    """As it is typed: 1000000, not 1e+06."""
    return f"{int(bound)}" if bound == int(bound) and abs(bound) < 1e15 else f"{bound:g}"


ANY = Range()
COUNT = Range(ge=1, le=1_000_000)
"""Prompts, samples, processes, hosts, files: what one step or one cluster has many of."""
COUNT_OR_NONE = Range(ge=0, le=1_000_000)
STEPS = Range(ge=1, le=1_000_000_000)
STEPS_OR_NONE = Range(ge=0, le=1_000_000_000)
TOKENS = Range(ge=1, le=100_000_000)
TOKENS_OR_NONE = Range(ge=0, le=100_000_000)
EXECUTIONS = Range(ge=1, le=10_000_000)
"""Of one step, or of one optimizer step: prompts times samples."""
SECONDS = Range(ge=0.01, le=30 * 86_400.0)
"""A limit of a wait: less than 10 ms ends everything, and nobody waits for more than 30 days."""
SECONDS_OR_NONE = Range(ge=0, le=30 * 86_400.0)
FRACTION = Range(ge=0, le=1)
COEFFICIENT = Range(ge=0, le=1_000)
"""Of a term of a loss or of a reward."""
BOUND = Range(ge=0, le=1e9)
"""Of a ratio; some switch a bound off with a large number."""
RATE = Range(ge=0, le=100)
"""A learning rate."""
PORT = Range(ge=1, le=65_535)
SEED = Range(ge=0, le=2**32 - 1)
"""What numpy takes, too."""
WHOLE = Range(ge=0, le=2**31 - 1)
"""A number of an engine of which no more is known than that it counts something."""
WHOLE_OR_OFF = Range(ge=-1, le=2**31 - 1)
"""-1 has a meaning of its own."""
REAL = Range(ge=0, le=1e12)

_MEGATRON: Mapping[str, Range] = {
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr"), RATE),
    **dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay"), COEFFICIENT),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"), Range(ge=0, lt=1)),
    "adam_eps": Range(gt=0, le=1),
    **dict.fromkeys(("optimizer_offload_fraction", "lr_warmup_fraction", "rotary_percent"), FRACTION),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), Range(ge=0, lt=1)),
    "lr_warmup_iters": STEPS_OR_NONE,
    **dict.fromkeys(("lr_wsd_decay_iters", "lr_decay_iters", "train_iters"), STEPS),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), COUNT),
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size"), COUNT),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"), COUNT),
    "mtp_loss_scaling_factor": COEFFICIENT,
    "inference_sampling_seed": SEED,
    "window_size": WHOLE_OR_OFF,
    "fp8_margin": Range(ge=-64, le=64),
    "glu_linear_offset": Range(ge=-1e6, le=1e6),
}
_SGLANG: Mapping[str, Range] = {
    "mem_fraction_static": Range(gt=0, lt=1),
    **dict.fromkeys(("swa_full_tokens_ratio", "tbo_token_distribution_threshold"), FRACTION),
    **dict.fromkeys(("speculative_accept_threshold_acc", "speculative_accept_threshold_single"), FRACTION),
    **dict.fromkeys(("context_length", "max_total_tokens", "max_prefill_tokens"), TOKENS),
    **dict.fromkeys(("chunked_prefill_size", "offload_group_size"), WHOLE_OR_OFF),
    **dict.fromkeys(("pp_size", "dp_size", "ep_size", "moe_dp_size", "attn_cp_size", "dcp_size"), COUNT),
    **dict.fromkeys(("max_running_requests", "stream_interval", "page_size", "cuda_graph_max_bs"), COUNT),
    **dict.fromkeys(("cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs_prefill"), COUNT),
    **dict.fromkeys(("tokenizer_worker_num", "detokenizer_worker_num", "max_loras_per_batch"), COUNT),
    **dict.fromkeys(("watchdog_timeout", "soft_watchdog_timeout", "elastic_ep_scale_timeout"), SECONDS),
    "dist_timeout": SECONDS,
    "default_priority_value": Range(ge=-(2**31), le=2**31 - 1),
}
_ROUTER: Mapping[str, Range] = {
    "max_concurrent_requests": WHOLE_OR_OFF,
    **dict.fromkeys(("cache_threshold", "retry_jitter_factor"), FRACTION),
    **dict.fromkeys(("request_timeout_secs", "worker_startup_timeout_secs", "health_check_timeout_secs"), SECONDS),
}
_OF: Mapping[str, Mapping[str, Range]] = {"megatron": _MEGATRON, "sglang": _SGLANG, "router": _ROUTER}


def range_of(owner: str, dest: str, kind: str) -> Range:
    """What a number of an engine's flag may be; unbounded for what is not a number."""
    if dest in _OF[owner]:
        return _OF[owner][dest]
    base = kind.removesuffix("_or_json").removeprefix("human_")
    if base == "int":
        return PORT if dest.endswith("port") else WHOLE
    return REAL if base == "float" else Range()
