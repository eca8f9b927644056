"""Run health: detectors that report problems in the logged metrics, with an explanation and advice.

`HealthWatch` is pure (no clock, no files). `HealthSink` feeds it during a run and logs its findings. The report feeds
it the rows of `metrics.jsonl` and gets the same findings.

Invariants
1. A detector only uses past steps, so the same rows produce the same findings, live or later.
2. A finding begins after a number of consecutive bad steps and ends after the same number of consecutive good steps. It
   is reported once, when it begins. If the problem recurs, that is a new finding.
3. Thresholds are only crossed by failing runs. The falling entropy and the growing share of solved groups that are
   normal in a healthy run do not trigger findings.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slime.observability.sinks import AXES, StepRecord, read_jsonl

logger = logging.getLogger(__name__)

EQUAL_STEPS = 2
"""A finding if all rewards of a step are equal in this many consecutive steps."""
TRUNCATED_SHARE, TRUNCATED_STEPS = 0.5, 3
"""A finding if over half of the samples are truncated in three consecutive steps; one small batch may be chance."""
EMPTY_SHARE = 0.05
"""A finding if turns without a token exceed this fraction of the number of samples."""
START_STEPS = 3
"""The initial value is the median over this many steps."""
ENTROPY_PART, ENTROPY_NATS, ENTROPY_STEPS = 0.1, 0.05, 3
"""Below 10 % of the initial value and below 0.05 nats (top token at 99 %), the policy no longer explores."""
SOLVED_REWARD = 0.95
"""From this reward on, a confident policy is not a problem."""
MISMATCH_FACTOR, MISMATCH_NATS, MISMATCH_STEPS = 3.0, 1e-4, 3
"""A finding if the mismatch exceeds both three times its initial value and float32 rounding."""

OF_BATCH = "train/train_rollout_logprob_abs_diff_current"
OF_PROBE = "probe/train_rollout_logprob_abs_diff_mean"
"""Means over the tokens of the batch and of the async probe. A maximum would fluctuate too much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem detected in the metrics."""

    kind: str
    """A key of `DETECTORS`, or `nothing trained`, which is only known at the end."""
    step: int
    """Step at which the problem was detected."""
    text: str
    """What was observed, why it is a problem, and what to do."""
    last_step: int | None = None
    """Step at which the problem ended. None while it persists."""


Series = Mapping[str, Sequence[float]]
"""Metric -> its values so far."""
Detector = Callable[[Series], str | None]
"""Returns a description of the problem in the latest step, or None."""


def equal_rewards(seen: Series) -> str | None:
    spread, reward = seen["rollout/raw_reward_std"], seen["rollout/raw_reward"]
    if not spread or not reward or spread[-1] > 1e-12:
        return None
    return (
        f"all rewards of a step are {reward[-1]:.4g}, so there is nothing to learn from them; check the samples and "
        "the grader, or use prompts of a different difficulty"
    )


def truncation(seen: Series) -> str | None:
    share = seen["rollout/truncated_ratio"]
    if not share or share[-1] <= TRUNCATED_SHARE:
        return None
    return (
        f"{share[-1]:.0%} of the samples are truncated, so most responses are incomplete when they are graded; raise "
        "--rollout-max-response-len, or prompt for shorter responses"
    )


EMPTY = "rollout/num_empty_turns"
LIMITS: Mapping[str, str] = {
    f"{EMPTY}/max_context_len": "--rollout-max-context-len",
    f"{EMPTY}/max_total_response_len": "--rollout-max-total-response-len",
    f"{EMPTY}/model_context": "the model's context (--sglang-context-length)",
    f"{EMPTY}/agent_max_turns": "--agent-max-turns",
}
"""Metric that counts turns left without a token by a limit -> the limit."""


def empty_turns(seen: Series) -> str | None:
    """Detects executions that still ask for turns after their budget is spent."""
    num, samples = seen[EMPTY], seen["rollout/num_samples"]
    if not num or not samples or num[-1] <= EMPTY_SHARE * samples[-1]:
        return None
    by = [f"{seen[key][-1]:.0f} by {flag}" for key, flag in LIMITS.items() if seen[key] and seen[key][-1]]
    return (
        f"{num[-1]:.0f} turns of {samples[-1]:.0f} samples got no token, because a limit left none ({', '.join(by)}); "
        "raise that limit, or let your function or agent end earlier"
    )


TRAINED_AGAIN = "rollout/num_tokens_trained_again"


def trained_again(seen: Series) -> str | None:
    num, tokens = seen[TRAINED_AGAIN], seen["rollout/response_tokens"]
    if not num or not tokens or not num[-1]:
        return None
    return (
        f"{num[-1]:.0f} of {tokens[-1]:.0f} trained tokens are repetitions, because several samples of an execution "
        "train the same sampled tokens; in each sample, mask what an earlier one trains: sample.loss_mask = [0] * "
        "start + list(sample.loss_mask[start:]), where start is the response_length before its own turn"
    )


REFUSED = "rollout/num_refused_samples"


def refused_samples(seen: Series) -> str | None:
    num = seen[REFUSED]
    if not num or not num[-1]:
        return None
    return (
        f"{num[-1]:.0f} samples were refused, because a trained token is not as an engine sampled it (the message of "
        "the step and the column `unscored` of `slime samples` say which); send input_ids and keep the ids and "
        "log-probs of the answers"
    )


def entropy_collapse(seen: Series) -> str | None:
    """Detects a policy that is certain of every token but does not solve its task."""
    entropy, reward = seen["train/entropy_loss"], seen["rollout/raw_reward"]
    if len(entropy) <= START_STEPS or (reward and reward[-1] >= SOLVED_REWARD):
        return None
    start = statistics.median(entropy[:START_STEPS])
    if entropy[-1] >= min(ENTROPY_PART * start, ENTROPY_NATS):
        return None
    return (
        f"the entropy fell from {start:.3g} to {entropy[-1]:.3g} nats, so the policy no longer explores; lower --lr, "
        "raise --eps-clip-high or --rollout-temperature, or add --use-kl-loss"
    )


def mismatch_rises(key: str) -> Detector:
    """Returns a detector for a growing difference between trainer and engine. `key`: metric for the mean difference."""

    def detect(seen: Series) -> str | None:
        values = seen[key]
        if len(values) <= START_STEPS:
            return None
        start = statistics.median(values[:START_STEPS])
        if values[-1] <= max(MISMATCH_FACTOR * start, MISMATCH_NATS):
            return None
        return (
            f"{key} rose from {start:.2g} to {values[-1]:.2g} nats, so the engine's policy no longer matches the "
            "trainer's; compare dtypes and sampling settings, or correct for it with --use-tis"
        )

    return detect


@dataclass(frozen=True, slots=True)
class Rule:
    detect: Detector
    metric: str
    """Only steps that log this metric count."""
    steps: int
    """Number of consecutive steps that begin or end a finding."""


DETECTORS: Mapping[str, Rule] = {
    "equal rewards": Rule(equal_rewards, "rollout/raw_reward_std", EQUAL_STEPS),
    "truncation": Rule(truncation, "rollout/truncated_ratio", TRUNCATED_STEPS),
    "turns without tokens": Rule(empty_turns, EMPTY, 1),
    "tokens trained again": Rule(trained_again, TRAINED_AGAIN, 1),
    "refused samples": Rule(refused_samples, REFUSED, 1),
    "entropy collapse": Rule(entropy_collapse, "train/entropy_loss", ENTROPY_STEPS),
    "rising mismatch": Rule(mismatch_rises(OF_BATCH), OF_BATCH, MISMATCH_STEPS),
    "rising mismatch of the probe": Rule(mismatch_rises(OF_PROBE), OF_PROBE, MISMATCH_STEPS),
}
NEEDED = frozenset(
    {
        *("rollout/raw_reward", "rollout/num_samples", "rollout/response_tokens", *LIMITS),
        *(rule.metric for rule in DETECTORS.values()),
    }
)


class HealthWatch:
    """Detects problems in logged steps."""

    def __init__(self, *, learns_from_rewards: bool = True) -> None:
        """`learns_from_rewards`: False for distillation and fine-tuning, where equal rewards are normal."""
        self._rules = {k: rule for k, rule in DETECTORS.items() if learns_from_rewards or k != "equal rewards"}
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._unwell: dict[str, int] = defaultdict(int)
        self._well: dict[str, int] = defaultdict(int)
        self._open: dict[str, Finding] = {}

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Returns the findings that begin with this record and those that end with it (with `last_step` set)."""
        for key in NEEDED & metrics.keys():
            if math.isfinite(metrics[key]):
                self._seen[key].append(metrics[key])
        changes = (self._judge(kind, rule, step) for kind, rule in self._rules.items() if rule.metric in metrics)
        return [change for change in changes if change is not None]

    @property
    def still(self) -> list[Finding]:
        """Findings that have not ended, with the values of the last step."""
        return list(self._open.values())

    def _judge(self, kind: str, rule: Rule, step: int) -> Finding | None:
        text = rule.detect(self._seen)
        self._unwell[kind] = 0 if text is None else self._unwell[kind] + 1
        self._well[kind] = self._well[kind] + 1 if text is None else 0
        if text is not None and kind not in self._open and self._unwell[kind] >= rule.steps:
            self._open[kind] = Finding(kind, step, text)
            return self._open[kind]
        if text is not None and kind in self._open:
            self._open[kind] = replace(self._open[kind], text=text)
        if kind in self._open and self._well[kind] >= rule.steps:
            begun = self._open.pop(kind)
            return Finding(kind, begun.step, begun.text, last_step=step)
        return None


def _step(row: Mapping[str, float]) -> int:
    return next((int(row[axis]) for axis in AXES.values() if axis in row), 0)


def findings(rows: Iterable[Mapping[str, float]], *, learns_from_rewards: bool = True) -> list[Finding]:
    """Returns all findings in the rows of `metrics.jsonl`, ordered by their first step."""
    watch = HealthWatch(learns_from_rewards=learns_from_rewards)
    found: dict[tuple[str, int], Finding] = {}
    for row in rows:
        for finding in watch.see(_step(row), row):
            found[finding.kind, finding.step] = finding
    found |= {(finding.kind, finding.step): finding for finding in watch.still}
    return sorted(found.values(), key=lambda f: (f.step, f.kind))


class HealthSink:
    """Logs a warning when a finding begins and a line when it ends."""

    essential = False

    def __init__(self, metrics_jsonl: Path, *, learns_from_rewards: bool = True) -> None:
        """`metrics_jsonl`: rows of earlier launches, which provide the initial values after a resume."""
        self._watch = HealthWatch(learns_from_rewards=learns_from_rewards)
        for row in read_jsonl(metrics_jsonl) if metrics_jsonl.is_file() else ():
            self._watch.see(_step(row), row)

    def write(self, record: StepRecord) -> None:
        for finding in self._watch.see(record.step, record.metrics):
            if finding.last_step is None:
                logger.warning("%s at step %d: %s", finding.kind, finding.step, finding.text)
            else:
                logger.info("resolved at step %d: %s since step %d", finding.last_step, finding.kind, finding.step)

    def close(self, *, failed: bool = False) -> None:
        pass


def learns_from_rewards(settings: Mapping[str, object]) -> bool:
    """Returns whether a run with these settings learns from rewards."""
    return settings.get("loss_type") != "sft_loss" and not settings.get("use_opd")
