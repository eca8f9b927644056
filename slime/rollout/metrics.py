"""What the samples of a rollout say about it, as flat metrics."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from slime.core.sample import Sample, Status
from slime.rollout.filters import rewards_by_execution
from slime.rollout.turns import turn_metrics
from slime.settings import Args


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """mean, median, max and min under `name/`; nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of `k` samples is correct (Chen et al., 2021, arXiv:2107.03374, eq. 1)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_rates(groups: Sequence[Sequence[Sample]], reward_key: str | None, num_samples: int) -> dict[int, float]:
    """k -> pass@k over prompts, of the powers of two up to `num_samples`; none for one. Right is a reward of 1."""
    hits_of = [[reward == 1.0 for reward in rewards_by_execution(group, reward_key)] for group in groups]
    out, k = {}, 1
    while num_samples > 1 and k <= num_samples:
        tried = [hits for hits in hits_of if len(hits) >= k]
        if tried:
            out[k] = statistics.fmean(pass_at_k(len(hits), sum(hits), k) for hits in tried)
        k *= 2
    return out


def _asked_for(args: Args, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """What `--log-passrate`, `--log-correct-samples` and `--log-reward-category` add."""
    metrics: dict[str, float] = {}
    if args.log_passrate:
        rates = pass_rates(groups, args.reward_key, args.n_samples_per_prompt)
        metrics |= {f"passrate/pass@{k}": rate for k, rate in rates.items()}
    if args.log_correct_samples:
        lengths = [
            sample.effective_response_length
            for group in groups
            for sample in group
            if rewards_by_execution([sample], args.reward_key) == [1.0]
        ]
        metrics |= spread("rollout/correct_length", lengths)
    if (key := args.log_reward_category) is not None:
        rewards = [s.reward for group in groups for s in group]
        found = Counter(
            str(reward[key]) for reward in rewards if isinstance(reward, dict) and reward.get(key) is not None
        )
        metrics |= {f"rollout/error_cat/{name}": count / len(rewards) for name, count in found.items()}
    return metrics


def sample_metrics(args: Args, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """`rollout/*` metrics of finished groups: rewards per execution, lengths and ends per sample."""
    reward_key = args.reward_key
    samples = [s for group in groups for s in group]
    if not samples:
        return {}
    rewards = [rewards_by_execution(group, reward_key) for group in groups]
    flat = [reward for group in rewards for reward in group]
    constant = [group[0] for group in rewards if group and len(set(group)) == 1]
    versions = [v for s in samples for v in s.weight_versions]
    metrics = spread("rollout/response_len", [s.effective_response_length for s in samples])
    metrics |= {
        "rollout/truncated_ratio": statistics.fmean(s.status is Status.TRUNCATED for s in samples),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_unscored_samples": float(sum(bool(s.unscored) for s in samples)),
        "rollout/num_ungradable_samples": float(sum(bool(s.ungradable) for s in samples)),
        "rollout/response_tokens": float(sum(s.effective_response_length for s in samples)),
        "rollout/zero_std/ratio": len(constant) / len(groups),
    }
    metrics |= {**turn_metrics("rollout", samples), **_asked_for(args, groups)}
    if flat:
        metrics["rollout/raw_reward"] = statistics.fmean(flat)
        metrics["rollout/raw_reward_std"] = statistics.pstdev(flat)
    for reward in constant:
        key = f"rollout/zero_std/count_{reward:.3g}"
        metrics[key] = metrics.get(key, 0.0) + 1.0
    if versions:
        metrics["rollout/weight_version/min"] = float(min(versions))
        metrics["rollout/weight_version/max"] = float(max(versions))
    return metrics


def speed(groups: Sequence[Sequence[Sample]], seconds: float, *, num_gpus: int | None) -> dict[str, float]:
    """How long a rollout took, and what each GPU of the engines made in a second of it."""
    tokens = sum(s.effective_response_length for group in groups for s in group)
    per_gpu = tokens / max(seconds, 1e-9) / max(num_gpus or 0, 1)
    return {"perf/rollout_time": seconds, "perf/tokens_per_gpu_per_sec": per_gpu}
