"""Turns and tool calls of samples with several turns: how a generate function reports them, and their metrics.

    from slime.rollout.turns import count_tool_call
    count_tool_call(sample)                  # a tool answered
    count_tool_call(sample, failed=True)     # it was called wrongly, raised or ran out of time

The counts are plain numbers in `sample.metadata["turn_counts"]`: `tool_calls`, `tool_errors`, and `turns` where a
function knows better than the tokens. They travel with the sample through retries, checkpoints and recordings; a sample
that starts over starts from zero. Turns need no report: a turn is a run of sampled tokens between context.

Counts are of an execution. Those of a fan-out add up, so siblings that share turns or calls say them once
(`slime.agent.session` does); metrics are per execution.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from slime.core.sample import NOT_SAMPLED, TURN_COUNTS, Sample


def count_tool_call(sample: Sample, *, failed: bool = False) -> None:
    """Books one call of a tool. `failed`: the model got an error instead of a result."""
    counts = sample.metadata.setdefault(TURN_COUNTS, {})
    counts["tool_calls"] = counts.get("tool_calls", 0) + 1
    counts["tool_errors"] = counts.get("tool_errors", 0) + int(failed)


def expect_tools(sample: Sample) -> None:
    """Says that the sample may call tools, so that it counts with zero calls until it does. Changes no count."""
    counts = sample.metadata.setdefault(TURN_COUNTS, {})
    counts.setdefault("tool_calls", 0)
    counts.setdefault("tool_errors", 0)


def num_turns(sample: Sample) -> int:
    """Turns of the model: what the generate function reported, or the runs of sampled tokens."""
    reported = _counts(sample).get("turns")
    if reported is not None:
        return reported
    versions = sample.column("token_versions")
    if versions is None or not len(versions):
        return 0
    sampled = versions != NOT_SAMPLED
    return int(sampled[0]) + int((sampled[1:] & ~sampled[:-1]).sum())


def tool_counts(sample: Sample) -> dict[str, int]:
    """`num_turns`, `tool_calls` and `tool_errors` of a sample with several turns or with tools; else nothing."""
    turns, counts = num_turns(sample), _counts(sample)
    if turns < 2 and "tool_calls" not in counts:
        return {}
    tools: dict[str, int] = {name: counts[name] for name in ("tool_calls", "tool_errors") if name in counts}
    return {"num_turns": turns, **tools}


def turn_metrics(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics under `prefix/` of turns, per execution, if any has several or tools; of tool calls, if any has tools."""
    executions: dict[tuple[int | None, int | None], Counter[str]] = {}
    for sample in samples:
        counts = executions.setdefault((sample.group_index, sample.index), Counter())
        counts.update({**tool_counts(sample), "num_turns": num_turns(sample)})
    turns = [counts["num_turns"] for counts in executions.values()]
    has_tools = any("tool_calls" in counts for counts in executions.values())
    if not has_tools and max(turns, default=0) < 2:
        return {}
    metrics = {f"{prefix}/num_turns/mean": statistics.fmean(turns), f"{prefix}/num_turns/max": float(max(turns))}
    if not has_tools:
        return metrics
    calls, errors = ([counts[name] for counts in executions.values()] for name in ("tool_calls", "tool_errors"))
    metrics[f"{prefix}/tool_calls/mean"] = statistics.fmean(calls)
    metrics[f"{prefix}/tool_calls/max"] = float(max(calls))
    metrics[f"{prefix}/tool_errors/mean"] = statistics.fmean(errors)
    if sum(calls):
        metrics[f"{prefix}/tool_error_ratio"] = sum(errors) / sum(calls)
    return metrics


def _counts(sample: Sample) -> dict[str, int]:
    """The whole numbers among what was reported; a dataset's column of that name may hold anything."""
    counts = sample.metadata.get(TURN_COUNTS)
    if not isinstance(counts, dict):
        return {}
    return {k: v for k, v in counts.items() if isinstance(v, int) and not isinstance(v, bool) and v >= 0}
