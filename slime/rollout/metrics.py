"""What the samples of a rollout say about it, as flat metrics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slime.core.sample import Sample, Status
from slime.rollout.filters import rewards_by_execution
from slime.rollout.turns import turn_metrics


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


def sample_metrics(reward_key: str | None, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """`rollout/*` metrics of finished groups: rewards per execution, lengths and ends per sample."""
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
        "rollout/response_tokens": float(sum(s.effective_response_length for s in samples)),
        "rollout/zero_std/ratio": len(constant) / len(groups),
    }
    metrics |= turn_metrics("rollout", samples)
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
