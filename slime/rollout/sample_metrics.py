"""Metrics of a batch's samples, including turns, tool calls and token staleness; and the choice of samples to display.

    count_tool_call(sample)                  # in a generate function: a tool returned a result
    count_tool_call(sample, failed=True)     # the call was malformed, raised or timed out

The counts are plain numbers in `sample.metadata["turn_counts"]`: `tool_calls`, `tool_errors` and, optionally, `turns`.
Without `turns`, each run of sampled tokens counts as one turn, and a run that fan-out siblings share counts once
(`count_siblings`). Counts stay with the sample across retries, checkpoints and recordings; a sample that starts over
loses them. Metrics sum the counts of siblings, so siblings that share calls must report them only once
(`slime.agent.session` does).

Invariants
1. The same samples, seed and step always lead to the same choice, and no sample is shown twice.
2. Displayed text is decoded only for people and never enters a batch. Failing to display a sample never ends a run.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime.core.engine_interface import WeightVersion
from slime.core.errors import DataError, LedgerError
from slime.core.sample import FINISH_REASONS, NOT_SAMPLED, TURN_COUNTS, Sample, Status
from slime.core.text import HIDDEN, evaluation_name, one_line, shorten, step_name, visible
from slime.observability.samples import Kind, Picked, ShownSample
from slime.observability.start_record import SECRET
from slime.rollout.filters import reward_of_executions, rewards_by_execution
from slime.settings import Args


def count_tool_call(sample: Sample, *, failed: bool = False) -> None:
    """Counts a tool call. `failed`: the model got an error instead of a result."""
    counts = sample.metadata.setdefault(TURN_COUNTS, {})
    counts["tool_calls"] = counts.get("tool_calls", 0) + 1
    counts["tool_errors"] = counts.get("tool_errors", 0) + int(failed)


def expect_tools(sample: Sample) -> None:
    """Includes the sample in the tool metrics, with zero calls until it makes one."""
    counts = sample.metadata.setdefault(TURN_COUNTS, {})
    counts.setdefault("tool_calls", 0)
    counts.setdefault("tool_errors", 0)


EMPTY_TURNS = ("max_context_len", "max_total_response_len", "model_context", "agent_max_turns")
"""The limits that can leave a turn without any tokens: on the tokens of the conversation, of the execution and of the
model's context, and on the number of turns.
"""


def count_empty_turns(sample: Sample, spent: Mapping[str, int]) -> None:
    """Adds an execution's turns that got no token. `spent`: limit (of `EMPTY_TURNS`) -> number of turns."""
    if spent:
        sample.metadata.setdefault(TURN_COUNTS, {}).update({f"empty_by_{name}": num for name, num in spent.items()})


def count_siblings(samples: Sequence[Sample], counts: Sequence[tuple[int, int]]) -> None:
    """Stores the result of `Transcript.of_siblings` in the samples. Turn counts from the generate function are kept."""
    for sample, (turns, again) in zip(samples, counts, strict=True):
        own = sample.metadata.setdefault(TURN_COUNTS, {})
        if isinstance(own, dict):
            own |= {"turns": own.get("turns", turns), "trained_again": again}


def _trained_again(samples: Sequence[Sample]) -> dict[str, float]:
    """Counts the trained tokens that are already trained in an earlier sibling; {} if no execution has siblings."""
    counts = [_counts(sample) for sample in samples if not sample.remove_sample]
    found = [one["trained_again"] for one in counts if "trained_again" in one]
    return {"rollout/num_tokens_trained_again": float(sum(found))} if found else {}


def empty_turn_metrics(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the number of turns that got no token, as metric `name`. If it is not 0, also returns the number per
    limit, as `name/<limit>`.
    """
    counts = [_counts(sample) for sample in samples]
    by = {limit: float(sum(one.get(f"empty_by_{limit}", 0) for one in counts)) for limit in EMPTY_TURNS}
    num = sum(by.values())
    return {name: num} | ({f"{name}/{limit}": value for limit, value in by.items()} if num else {})


def num_turns(sample: Sample) -> int:
    """Returns the number of turns reported by the generate function, else the number of runs of sampled tokens."""
    reported = _counts(sample).get("turns")
    if reported is not None:
        return reported
    versions = sample.column("token_versions")
    if versions is None or not len(versions):
        return 0
    sampled = versions != NOT_SAMPLED
    return int(sampled[0]) + int((sampled[1:] & ~sampled[:-1]).sum())


def tool_counts(sample: Sample) -> dict[str, int]:
    """Returns `num_turns`, `tool_calls` and `tool_errors` of a sample; {} if it has a single turn and no tools."""
    turns, counts = num_turns(sample), _counts(sample)
    if turns < 2 and "tool_calls" not in counts:
        return {}
    tools: dict[str, int] = {name: counts[name] for name in ("tool_calls", "tool_errors") if name in counts}
    return {"num_turns": turns, **tools}


def turn_metrics(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns turn and tool metrics per execution, under `prefix/`; {} if no execution has several turns or tools."""
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
    """Returns only the valid counts, because a dataset may have an unrelated column with the same name."""
    counts = sample.metadata.get(TURN_COUNTS)
    if not isinstance(counts, dict):
        return {}
    return {k: v for k, v in counts.items() if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, median, max and min under `name/`; {} if there are no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased pass@k estimate (Chen et al., 2021, arXiv:2107.03374, eq. 1)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_rates(groups: Sequence[Sequence[Sample]], reward_key: str | None, num_samples: int) -> dict[int, float]:
    """Returns k -> mean pass@k over prompts, for powers of two up to `num_samples`; {} if `num_samples` is 1. A sample
    passes if its reward is 1.
    """
    hits_of = [[reward == 1.0 for reward in rewards_by_execution(group, reward_key)] for group in groups]
    out, k = {}, 1
    while num_samples > 1 and k <= num_samples:
        tried = [hits for hits in hits_of if len(hits) >= k]
        if tried:
            out[k] = statistics.fmean(pass_at_k(len(hits), sum(hits), k) for hits in tried)
        k *= 2
    return out


def _scores(sample: Sample) -> dict[str, float]:
    """Returns the finite numbers in a dict reward; {} for other rewards."""
    found = sample.reward.items() if isinstance(sample.reward, dict) else ()
    return {str(k): float(v) for k, v in found if isinstance(v, int | float) and math.isfinite(v)}


def _score_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean of each number in dict rewards over the samples that have it, for up to `MAX_SCORES` keys."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in _scores(sample).items():
            values.setdefault(key, []).append(value)
    return {f"rollout/score/{key}": statistics.fmean(values[key]) for key in sorted(values)[:MAX_SCORES]}


def _optional_metrics(args: Args, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns the metrics of `--log-passrate`, `--log-correct-samples` and `--log-reward-category`."""
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
    """Returns `rollout/*` metrics of finished groups: rewards per execution, lengths and statuses per sample."""
    reward_key = args.reward_key
    samples = [s for group in groups for s in group]
    if not samples:
        return {}
    rewards = [rewards_by_execution(group, reward_key) for group in groups]
    flat = [reward for group in rewards for reward in group]
    totals = [list(reward_of_executions(group, reward_key, total=True).values()) for group in groups]
    constant = [group[0] for group in totals if group and len(set(group)) == 1]
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
    metrics |= {**empty_turn_metrics("rollout/num_empty_turns", samples), **_trained_again(samples)}
    metrics |= {**turn_metrics("rollout", samples), **_score_means(samples), **_optional_metrics(args, groups)}
    if flat:
        metrics["rollout/raw_reward"] = statistics.fmean(flat)
        metrics["rollout/raw_reward_std"] = statistics.pstdev(flat)
        if any(s.held("token_rewards") is not None for s in samples):
            metrics["rollout/total_reward"] = statistics.fmean(reward for group in totals for reward in group)
    for reward in constant:
        key = f"rollout/zero_std/count_{reward:.3g}"
        metrics[key] = metrics.get(key, 0.0) + 1.0
    if versions:
        metrics["rollout/weight_version/min"] = float(min(versions))
        metrics["rollout/weight_version/max"] = float(max(versions))
    return metrics


def speed(groups: Sequence[Sequence[Sample]], seconds: float, *, num_gpus: int | None) -> dict[str, float]:
    """Returns the duration of a rollout, and its response tokens per second per GPU."""
    tokens = sum(s.effective_response_length for group in groups for s in group)
    per_gpu = tokens / max(seconds, 1e-9) / max(num_gpus or 0, 1)
    return {"perf/rollout_time": seconds, "perf/tokens_per_gpu_per_sec": per_gpu}


logger = logging.getLogger(__name__)

REASON_OF = {status: reason for reason, status in FINISH_REASONS.items()}
MAX_LABEL_CHARS, MAX_SCORES = 500, 20
MAX_ENTRIES, MAX_DEPTH = 50, 4
"""Limits on displayed metadata: entries per dict or list, and levels of nesting."""


def pick(rewards: Sequence[float | None], num: int, chance: random.Random) -> list[tuple[int, Picked]]:
    """Returns the positions of up to `num` samples to display: best, worst, then random ones. `chance` breaks ties.

    Picks a best and a worst sample only if at least two rewards are finite.
    """
    order = list(range(len(rewards)))
    chance.shuffle(order)
    scored = sorted((i for i in order if _comparable(rewards[i])), key=lambda i: -float(rewards[i] or 0.0))
    picked: list[tuple[int, Picked]] = []
    if len(scored) > 1:
        picked = [(scored[0], "best"), (scored[-1], "worst")]
    taken = {i for i, _ in picked}
    rest: list[tuple[int, Picked]] = [(i, "random") for i in order if i not in taken]
    return (picked + rest)[:num]


def _comparable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


class Showcase:
    """Samples to display for each step and evaluation, as text, until they are logged with the metrics."""

    def __init__(self, args: Args, tokenizer: Any) -> None:
        """`tokenizer`: the HF tokenizer; None: displays the samples' own text."""
        self._args, self._tokenizer = args, tokenizer
        self._picked: dict[tuple[Kind, int], list[ShownSample]] = {}

    def take(self, kind: Kind, step: int) -> list[ShownSample]:
        """Removes and returns the samples of a step or an evaluation."""
        return self._picked.pop((kind, step), [])

    def add_rollout(self, step: int, groups: Sequence[Sequence[Sample]]) -> None:
        samples = [sample for group in groups for sample in group]
        self._add("rollout", step, None, samples, self._args.reward_key)

    def add_evaluation(self, step: int, data: Mapping[str, Mapping[str, Any]]) -> None:
        for name, entry in data.items():
            self._add("eval", step, name, list(entry.get("samples") or ()), self._args.eval_reward_key)

    def _add(
        self, kind: Kind, step: int, dataset: str | None, samples: Sequence[Sample], reward_key: str | None
    ) -> None:
        if not self._args.log_samples:
            return
        chance = random.Random(" ".join(map(str, (self._args.rollout_seed, kind, step, dataset))))
        try:
            rewards = [self._reward(sample, reward_key) for sample in samples]
            shown = [
                self._show(samples[i], rewards[i], kind=kind, step=step, dataset=dataset, picked=why)
                for i, why in pick(rewards, self._args.log_samples, chance)
            ]
        except Exception:  # user samples may contain anything
            name = evaluation_name(step) if kind == "eval" else step_name(step)
            logger.exception("the samples (%s, %s) cannot be displayed", kind, name)
            return
        self._picked.setdefault((kind, step), []).extend(shown)

    def _reward(self, sample: Sample, reward_key: str | None) -> float | None:
        """Returns the reward; None for SFT conversations, which are not graded."""
        if self._args.loss_type == "sft_loss" and not sample.weight_versions:
            return None
        try:
            return sample.get_reward_value(reward_key)
        except DataError:
            return None

    def _show(
        self, sample: Sample, reward: float | None, *, kind: Kind, step: int, dataset: str | None, picked: Picked
    ) -> ShownSample:
        start, limit = sample.prompt_length, self._args.log_samples_max_chars
        ids = sample.column("tokens")
        prompt_ids, response_ids = ([], []) if ids is None else (ids[:start].tolist(), ids[start:].tolist())
        prompt, response = self._text(prompt_ids, sample.prompt), self._text(response_ids, sample.response)
        versions = sample.weight_versions
        without = sample.label is None or (isinstance(sample.label, str) and not sample.label)
        label = None if without else shorten(visible(_as_text(sample.label)), MAX_LABEL_CHARS)
        return ShownSample(
            kind=kind,
            step=step,
            dataset=dataset,
            prompt=shorten(visible(prompt), limit),
            response=shorten(visible(response), limit),
            reward=reward,
            label=label,
            status=sample.status.value,
            response_length=sample.response_length,
            weight_version=max(versions, default=None),
            finish_reason=REASON_OF.get(sample.status) if versions else None,
            picked=picked,
            group_index=sample.group_index,
            index=sample.index,
            more=_more(sample),
            metadata=shown_metadata(sample.metadata, limit),
        )

    def _text(self, ids: Sequence[int], text: Any) -> str:
        """Decodes the ids, including special tokens. Without ids or a tokenizer, returns the sample's own text."""
        if ids and self._tokenizer is not None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return _as_text(text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _more(sample: Sample) -> dict[str, Any]:
    """Returns fields that only some samples have."""
    more: dict[str, Any] = {}
    if len(sample.weight_versions) > 1:
        more["weight_versions"] = sample.weight_versions
    trained = 0 if sample.remove_sample else sample.effective_response_length
    if trained != sample.response_length:
        more["trained_tokens"] = trained
    if isinstance(sample.reward, dict):
        more["scores"] = dict(list(_scores(sample).items())[:MAX_SCORES])
    if (rewards := sample.column("token_rewards")) is not None and rewards.any():
        more["token_rewards"] = rewards[rewards != 0][:MAX_SCORES].tolist()
    for name in ("unscored", "ungradable"):
        if reason := getattr(sample, name):
            more[name] = shorten(visible(reason), MAX_LABEL_CHARS)
    return more | tool_counts(sample)


def shown_metadata(metadata: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Returns the metadata from the dataset and the user's functions as JSON: at most `limit` characters per entry,
    with a note where something is left out, control characters escaped, and values of secret names hidden.
    """
    own = {key: value for key, value in metadata.items() if key != TURN_COUNTS}
    plain = _plain(own, limit, depth=0)
    for key, value in plain.items():
        if not isinstance(value, str) and len(text := json.dumps(value, ensure_ascii=False)) > limit:
            plain[key] = shorten(text, limit)
    return dict(plain)


def _plain(value: Any, limit: int, depth: int) -> Any:
    """Returns a value as JSON without NaN. Replaces anything nested deeper than `MAX_DEPTH` with a note."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        kept = {
            one_line(str(key), MAX_LABEL_CHARS): HIDDEN
            if SECRET.search(str(key).lower())
            else _plain(one, limit, depth + 1)
            for key, one in itertools.islice(value.items(), MAX_ENTRIES)
        }
        more = len(value) - MAX_ENTRIES
        return kept | ({"...": f"{more} more entries left out"} if more > 0 else {})
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        more = len(value) - MAX_ENTRIES
        kept_items = [_plain(one, limit, depth + 1) for one in value[:MAX_ENTRIES]]
        return kept_items + ([f"... {more} more entries left out"] if more > 0 else [])
    if isinstance(value, Mapping | list | tuple):
        return f"[... {len(value)} entries left out ...]"
    try:
        return shorten(visible(str(value)), limit)
    except Exception:  # the user's __str__
        return f"<{type(value).__name__}>"


def staleness(groups: Sequence[Sequence[Sample]], *, now: WeightVersion, limit: int | None) -> dict[str, float]:
    """Returns the mean and maximum age of the sampled tokens, in weight versions behind `now`; {} without sampled
    tokens.

    Also returns the maximum number of versions since work on a group began. Raises `LedgerError` if a token is older
    than `limit`.
    """
    columns = [column for group in groups for s in group if (column := s.column("token_versions")) is not None]
    sampled = [column[column != NOT_SAMPLED] for column in columns]
    num = sum(map(len, sampled))
    if not num:
        return {}
    oldest = now - min(int(versions.min()) for versions in sampled if len(versions))
    if limit is not None and oldest > limit:
        raise LedgerError(
            f"the rollout function returned a token that is {oldest} versions older than the weights to be trained, "
            f"but --max-weight-staleness is {limit}; drop such samples, or raise the limit"
        )
    waited = [now - s.started_version for group in groups for s in group if s.started_version is not None]
    mean = now - sum(int(versions.sum(dtype="int64")) for versions in sampled) / num
    since_start = {"rollout/staleness/since_start/max": float(max(waited))} if waited else {}
    return {"rollout/staleness/mean": mean, "rollout/staleness/max": float(oldest), **since_start}
