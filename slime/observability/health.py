"""Run health: detectors that report problems in the logged metrics, with an explanation and advice.

`HealthWatch` is pure (no clock, no files). `HealthSink` feeds it during a run and logs its findings. The report feeds
it the rows of `metrics.jsonl` and gets the same findings. `Alerts` sends findings, hangs and restarts to people.

Invariants
1. A detector only uses past steps, so the same rows produce the same findings, live or later.
2. A finding begins after a number of consecutive bad steps and ends after the same number of consecutive good steps. It
   is reported once, when it begins. If the problem recurs, that is a new finding.
3. Thresholds are only crossed by failing runs. The falling entropy and the growing share of solved groups that are
   normal in a healthy run do not trigger findings.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import queue
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

SIGNAL_STEPS = 2
"""A finding if no group of a step has different rewards in this many consecutive steps."""
RECENT_STEPS, SLOW_FACTOR, SLOW_S, SLOW_STEPS = 50, 2.0, 5.0, 3
"""A finding if a step takes more than twice the seconds per token of recent steps, and at least 5 s more than them."""
MFU_PART, MFU_TFLOPS, MFU_STEPS = 0.6, 1.0, 3
"""A finding below 60 % of the recent TFLOP/s. Below 1 TFLOP/s (a CPU), the rate says little."""

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


def no_signal(seen: Series) -> str | None:
    """Detects groups that all teach nothing, although rewards differ between groups."""
    share, spread = seen[ZERO_STD], seen["rollout/raw_reward_std"]
    if not share or share[-1] < 1.0 or not spread or spread[-1] <= 1e-12:  # `equal_rewards` reports the last case
        return None
    return (
        "in every group, all rewards are equal, so every advantage is zero and nothing is learned; use prompts that "
        "the policy sometimes solves (--dynamic-sampling-filter-path), more samples per prompt, or a finer reward"
    )


ZERO_STD, STEP_TIME, TFLOPS = "rollout/zero_std/ratio", "perf/step_time", "perf/actor_train_tflops"
NOT_A_STEP = ("perf/eval_time", "perf/save_model_time")
"""Parts of `perf/step_time` that not every step has."""


def slow_steps(seen: Series) -> str | None:
    """Detects steps that take longer than before for the same number of tokens."""
    times, tokens = seen[STEP_TIME], seen["rollout/response_tokens"]
    num = min(len(times), len(tokens))
    if num <= 2 * START_STEPS or min(tokens[-num:]) <= 0:
        return None
    pairs = list(zip(times[-num:], tokens[-num:], strict=True))[-RECENT_STEPS:]
    usual = statistics.median(seconds / num_tokens for seconds, num_tokens in pairs[:-SLOW_STEPS])
    (took_s, num_tokens), expected_s = pairs[-1], usual * pairs[-1][1]
    if took_s <= SLOW_FACTOR * expected_s or took_s - expected_s <= SLOW_S:
        return None
    return (
        f"the step took {took_s:.0f} s for {num_tokens:.0f} tokens, where recent steps would have taken "
        f"{expected_s:.0f} s; compare the parts of the step in the report, perf/rank_train_time of the ranks, and the "
        "load of the hosts"
    )


SLOWEST, SLOWEST_TIME, MEDIAN_TIME = (
    "perf/slowest_rank",
    "perf/slowest_rank_train_time",
    "perf/median_rank_train_time",
)
STRAGGLER_PART, STRAGGLER_S, STRAGGLER_STEPS = 1.25, 0.5, 5
"""A finding if the same rank takes a quarter more time than the median rank, and at least half a second, in five steps.
"""


def straggler(seen: Series) -> str | None:
    """Detects a training rank that all others wait for, step after step."""
    ranks, slowest, median = seen[SLOWEST], seen[SLOWEST_TIME], seen[MEDIAN_TIME]
    if len(ranks) < STRAGGLER_STEPS or len(set(ranks[-STRAGGLER_STEPS:])) > 1:
        return None
    if any(
        most <= STRAGGLER_PART * usual or most - usual <= STRAGGLER_S
        for most, usual in zip(slowest[-STRAGGLER_STEPS:], median[-STRAGGLER_STEPS:], strict=True)
    ):
        return None
    return (
        f"training rank {ranks[-1]:.0f} takes {slowest[-1]:.3g} s for its passes, where the median rank takes "
        f"{median[-1]:.3g} s, for {STRAGGLER_STEPS} steps, and all others wait for it; look at the GPU and the load of "
        "its host, and at --balance-data"
    )


def mfu_drop(seen: Series) -> str | None:
    rates = [rate for rate in seen[TFLOPS] if rate > 0][-RECENT_STEPS:]
    if len(rates) <= 2 * START_STEPS:
        return None
    usual = statistics.median(rates[:-MFU_STEPS])
    if usual < MFU_TFLOPS or rates[-1] >= MFU_PART * usual:
        return None
    return (
        f"training runs at {rates[-1]:.3g} TFLOP/s per rank, where {usual:.3g} was usual; look for a slow rank "
        "(perf/rank_train_time), a hot or throttled GPU (nvidia-smi) and shorter sequences"
    )


@dataclass(frozen=True, slots=True)
class Rule:
    detect: Detector
    metric: str
    """Only steps that log this metric count."""
    steps: int
    """Number of consecutive steps that begin or end a finding."""


DETECTORS: Mapping[str, Rule] = {
    "equal rewards": Rule(equal_rewards, "rollout/raw_reward_std", EQUAL_STEPS),
    "no learning signal": Rule(no_signal, ZERO_STD, SIGNAL_STEPS),
    "rising step time": Rule(slow_steps, STEP_TIME, SLOW_STEPS),
    "straggler": Rule(straggler, SLOWEST, 1),
    "MFU drop": Rule(mfu_drop, TFLOPS, MFU_STEPS),
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
        *(SLOWEST_TIME, MEDIAN_TIME),
        *(rule.metric for rule in DETECTORS.values()),
    }
)


OF_REWARDS = ("equal rewards", "no learning signal")


class HealthWatch:
    """Detects problems in logged steps."""

    def __init__(self, *, learns_from_rewards: bool = True) -> None:
        """`learns_from_rewards`: False for distillation and fine-tuning, where equal rewards are normal."""
        self._rules = {k: rule for k, rule in DETECTORS.items() if learns_from_rewards or k not in OF_REWARDS}
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._unwell: dict[str, int] = defaultdict(int)
        self._well: dict[str, int] = defaultdict(int)
        self._open: dict[str, Finding] = {}

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Returns the findings that begin with this record and those that end with it (with `last_step` set)."""
        if STEP_TIME in metrics:
            rest_s = metrics[STEP_TIME] - sum(metrics.get(part, 0.0) for part in NOT_A_STEP)
            metrics = {**metrics, STEP_TIME: rest_s}
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

    def __init__(self, metrics_jsonl: Path, *, learns_from_rewards: bool = True, alerts: Alerts | None = None) -> None:
        """`metrics_jsonl`: rows of earlier launches, which provide the initial values after a resume. `alerts`: gets
        every finding."""
        self._alerts = alerts
        self._watch = HealthWatch(learns_from_rewards=learns_from_rewards)
        for row in read_jsonl(metrics_jsonl) if metrics_jsonl.is_file() else ():
            self._watch.see(_step(row), row)

    def write(self, record: StepRecord) -> None:
        for finding in self._watch.see(record.step, record.metrics):
            if finding.last_step is None:
                logger.warning("%s at step %d: %s", finding.kind, finding.step, finding.text)
                if self._alerts is not None:
                    self._alerts.fire(finding.kind, finding.text, step=finding.step)
            else:
                if self._alerts is not None:
                    self._alerts.resolve(finding.kind)
                logger.info("resolved at step %d: %s since step %d", finding.last_step, finding.kind, finding.step)

    def close(self, *, failed: bool = False) -> None:
        pass


def learns_from_rewards(settings: Mapping[str, object]) -> bool:
    """Returns whether a run with these settings learns from rewards."""
    return settings.get("loss_type") != "sft_loss" and not settings.get("use_opd")


# --- Alerts

ALERT_LIMIT_S, ALERT_TRIES, ALERT_PAUSE_S = 10.0, 3, 2.0
LAST_ALERTS_S = 15.0
"""How long the end of a run waits for alerts that are still being delivered."""


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    """`hang`, `restart`, `failed`, or a key of `DETECTORS`."""
    text: str
    """What happened and what to do."""
    run_id: str
    run_dir: str
    host: str
    time_s: float
    """Unix time."""
    step: int | None = None

    def body(self) -> dict[str, object]:
        """Returns the JSON of the webhook. Slack and many others show the key `text`."""
        return {**asdict(self), "text": f"slime {self.run_dir}: {self.kind}: {self.text}"}

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of the command."""
        return {
            f"SLIME_ALERT_{key.upper()}": "" if value is None else str(value) for key, value in asdict(self).items()
        }


def count_nothing(kind: str) -> None:
    pass


class Alerts:
    """Delivers alerts to a webhook and a command (`--alert-webhook`, `--alert-command`), in a thread of its own.

    Invariants
    1. An incident is delivered once. `resolve` ends it; if it happens again, that is a new incident.
    2. A failed delivery is repeated and then logged. It never delays or ends the run.
    """

    def __init__(
        self,
        *,
        webhook: str | None,
        command: str | None,
        run_id: str,
        run_dir: str,
        count: Callable[[str], None] = count_nothing,
    ) -> None:
        """`count`: called with the kind of each alert."""
        self._webhook, self._command, self._run_id, self._run_dir = webhook, command, run_id, run_dir
        self._count = count
        self._open: set[tuple[str, str]] = set()
        self._queue: queue.Queue[Alert | None] = queue.Queue()
        self._thread = threading.Thread(target=self._deliver_all, name="alerts", daemon=True)
        self._thread.start()

    def fire(self, kind: str, text: str, *, key: str = "", step: int | None = None) -> None:
        """Delivers an alert unless this incident is known. `key`: tells incidents of one kind apart."""
        if (kind, key) in self._open:
            return
        self._open.add((kind, key))
        self._count(kind)
        host = socket.gethostname()
        self._queue.put(Alert(kind, text, self._run_id, self._run_dir, host, time.time(), step))

    def resolve(self, kind: str, *, key: str = "") -> None:
        self._open.discard((kind, key))

    def close(self) -> None:
        """Waits up to `LAST_ALERTS_S` for alerts that are still being delivered."""
        self._queue.put(None)
        self._thread.join(LAST_ALERTS_S)

    def _deliver_all(self) -> None:
        while (alert := self._queue.get()) is not None:
            for what, deliver in (("--alert-webhook", self._post), ("--alert-command", self._run)):
                problem = _tried(deliver, alert)
                if problem is not None:
                    logger.error("%s did not take the alert %r: %s", what, alert.kind, problem)

    def _post(self, alert: Alert) -> None:
        if self._webhook is not None:
            body = json.dumps(alert.body()).encode()
            asked = urllib.request.Request(self._webhook, data=body, headers={"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=ALERT_LIMIT_S) as answer:
                answer.read()

    def _run(self, alert: Alert) -> None:
        if self._command is not None:
            subprocess.run(
                ["/bin/sh", "-c", self._command],
                env={**os.environ, **alert.variables()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=ALERT_LIMIT_S,
                check=True,
            )


def _tried(deliver: Callable[[Alert], None], alert: Alert) -> str | None:
    """Tries to deliver an alert up to `ALERT_TRIES` times. Returns the last error without the URL, or None."""
    problem = None
    for number in range(ALERT_TRIES):
        if number:
            time.sleep(ALERT_PAUSE_S)
        try:
            deliver(alert)
            return None
        except subprocess.CalledProcessError as error:
            problem = f"exit status {error.returncode}: {error.stderr.decode(errors='replace').strip()[-200:]}"
        except (OSError, ValueError, subprocess.TimeoutExpired, http.client.HTTPException) as error:
            problem = type(error).__name__ if isinstance(error, subprocess.TimeoutExpired) else str(error)
    return problem
