"""The panels of a report, defined in one table for all kinds of run. Panels without data are omitted.

Each line of a panel shows one metric. `*` in a key matches any evaluation dataset and adds one line per dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slime.observability.report.record import Curve, Row, RunKind, RunRecord, curve, steps_not_finite
from slime.observability.sinks import LOSS_ROUNDING, eval_name

Scale = Literal["auto", "zero", "unit", "share", "percent", "log"]
"""auto: range of the values; zero: from 0; unit: 0 to 1 if possible; share: 0 to 100 %; percent: from 0, in %; log."""


@dataclass(frozen=True, slots=True)
class Line:
    key: str
    label: str = ""
    """`*` is replaced with the dataset. Empty if the panel's title is sufficient."""
    dashed: bool = False
    unless_alone: bool = False
    """Omit the line if it has only one step while another line has more."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    about: str
    """What the panel shows and what to look for."""
    section: str
    lines: Sequence[Line]
    unit: str = ""
    scale: Scale = "zero"
    band: tuple[str, str] | None = None
    """Minimum and maximum metrics for a band around the first line."""
    if_any: bool = False
    """Omit the panel if all values are zero."""
    flat_in_words: bool = False
    """If the values never change, show a sentence instead of the panel."""
    rounding: float = 0.0
    """Omit the panel if all values are below this, because they are rounding errors."""
    in_picture: bool = True
    """Whether the panel is included in `report.png`. The HTML page includes all panels."""
    kinds: frozenset[RunKind] = field(default_factory=lambda: frozenset(RunKind))


@dataclass(frozen=True, slots=True)
class Series:
    """A line with its data."""

    label: str
    curve: Curve
    dashed: bool = False
    is_joined: bool = False
    """Whether the series represents several identical lines."""


@dataclass(frozen=True, slots=True)
class Drawn:
    panel: Panel
    series: Sequence[Series]
    scale: Scale
    band: tuple[Curve, Curve] | None = None
    lost: Sequence[int] = ()
    """Steps with a NaN or infinite value, which is not drawn."""

    @property
    def is_named(self) -> bool:
        """Whether the panel needs a legend."""
        return len(self.series) > 1 or self.band is not None or self.series[0].is_joined

    @property
    def in_words(self) -> bool:
        """Whether the panel is replaced by a sentence because no line changes."""
        flat = all(len(one.curve.steps) > 1 and len(set(one.curve.values)) == 1 for one in self.series)
        even = self.band is None or all(len(set(edge.values)) == 1 for edge in self.band)
        return self.panel.flat_in_words and flat and even


TERA = "TFLOP/s"
SMALL_TERA = 0.5
"""Smaller values are shown in GFLOP/s."""
LEARNING, SAMPLES, OPTIMIZER = "Learning", "Samples", "Optimizer"
AGREEMENT, TIME = "Trainer and engine", "Time"
SFT = frozenset({RunKind.SFT})
SAMPLED = frozenset(RunKind) - SFT
"""Kinds of run that have responses and rewards. Fine-tuning logs zeros for both."""
WITH_STALENESS = frozenset({RunKind.ASYNC})

MISMATCH = (
    Line("train/train_rollout_logprob_abs_diff_max", "worst token", unless_alone=True),
    Line("train/train_rollout_logprob_abs_diff_p99", "99 % are below", unless_alone=True),
    Line("train/train_rollout_logprob_abs_diff_current", "mean", unless_alone=True),
)
PROBE = (
    Line("probe/train_rollout_logprob_abs_diff_max", "fresh responses, worst token"),
    Line("probe/train_rollout_logprob_abs_diff_mean", "fresh responses, mean", dashed=True),
)
"""Asynchronous runs use fresh responses for comparison, because their batches are older than the trainer's weights."""

PANELS: Sequence[Panel] = (
    Panel(
        "Loss",
        "The minimised loss: on the step's conversations before its update, and on held-out ones after it. If the "
        "held-out loss rises again, the model is overfitting.",
        LEARNING,
        (Line("train/loss", "trained"), Line("eval/*-loss", "held out: *")),
        unit="nats",
        scale="auto",
        kinds=SFT,
    ),
    Panel(
        "Reward",
        "Mean reward of the trained samples, before normalisation.",
        LEARNING,
        (Line("rollout/raw_reward"),),
        scale="unit",
        kinds=SAMPLED,
    ),
    Panel(
        "Held-out score",
        "Mean score on data that is never trained on.",
        LEARNING,
        (Line("eval/*", "*"), Line("eval/*-pass@", "*, pass@", dashed=True)),
        scale="unit",
    ),
    Panel(
        "Entropy",
        "Entropy of the policy's next-token distribution. Near zero, the policy no longer explores.",
        LEARNING,
        (Line("train/entropy_loss"),),
        unit="nats",
    ),
    Panel(
        "KL",
        "How far one update, or the entire training, has moved the policy.",
        LEARNING,
        (
            Line("train/ppo_kl", "to the old policy"),
            Line("train/kl_loss", "to the reference"),
            Line("train/kl_in_reward", "to the reference, in the reward"),
        ),
        unit="nats",
        scale="auto",
        if_any=True,
    ),
    Panel(
        "Response length",
        "Trained tokens per sample: mean, and range from shortest to longest.",
        SAMPLES,
        (Line("rollout/response_len/mean", "mean"), Line("rollout/response_len/median", "median", dashed=True)),
        unit="tokens",
        band=("rollout/response_len/min", "rollout/response_len/max"),
        flat_in_words=True,
    ),
    Panel(
        "Conversation length",
        "Mean number of tokens per conversation, including the prompt.",
        SAMPLES,
        (Line("rollout/total_len/mean"),),
        unit="tokens",
        flat_in_words=True,
    ),
    Panel(
        "Truncated",
        "Share of samples that hit a length limit.",
        SAMPLES,
        (Line("rollout/truncated_ratio", "trained"), Line("eval/*-truncated_ratio", "held out: *", dashed=True)),
        scale="share",
        kinds=SAMPLED,
    ),
    Panel(
        "Groups without variance",
        "Share of groups in which all rewards are equal. Group-relative advantages are zero for them.",
        SAMPLES,
        (Line("rollout/zero_std/ratio"),),
        scale="share",
        kinds=SAMPLED,
    ),
    Panel(
        "Turns and tool calls",
        "Means per execution.",
        SAMPLES,
        (
            Line("rollout/num_turns/mean", "turns"),
            Line("rollout/tool_calls/mean", "tool calls"),
            Line("rollout/tool_errors/mean", "tool errors", dashed=True),
        ),
    ),
    Panel(
        "Groups not trained",
        "Groups that were filtered on purpose, given up, or issued again after a failure.",
        SAMPLES,
        (
            Line("rollout/num_filtered_groups", "filtered"),
            Line("rollout/num_failed_groups", "given up"),
            Line("rollout/num_retried_groups", "issued again"),
        ),
        unit="groups",
        if_any=True,
        in_picture=False,
    ),
    Panel(
        "Policy loss",
        "The minimised loss. Its magnitude means little, but sudden jumps matter.",
        OPTIMIZER,
        (Line("train/loss", "whole"), Line("train/pg_loss", "policy part", dashed=True)),
        scale="auto",
        rounding=LOSS_ROUNDING,
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "Critic loss",
        "Error of the critic's values compared with the returns.",
        OPTIMIZER,
        (Line("train/critic-value_loss"),),
    ),
    Panel(
        "Gradient norm",
        "Global norm before clipping. A spike indicates a bad batch; a steady rise, a learning rate that is too high.",
        OPTIMIZER,
        (Line("train/grad_norm", "policy"), Line("train/critic-grad_norm", "critic")),
    ),
    Panel(
        "Learning rate",
        "Learning rate of the first parameter group.",
        OPTIMIZER,
        (Line("train/lr-pg_0", "policy"), Line("train/critic-lr-pg_0", "critic")),
        flat_in_words=True,
    ),
    Panel(
        "Clipped tokens",
        "Share of tokens with a clipped ratio, or that were dropped by a correction.",
        OPTIMIZER,
        (
            Line("train/pg_clipfrac", "ratio clipped"),
            Line("train/tis_clipfrac", "weight clipped"),
            Line("train/rejected", "rejected"),
            Line("train/opsm_clipfrac", "masked sequences"),
        ),
        scale="percent",
        if_any=True,
    ),
    Panel(
        "Train-inference mismatch",
        "Difference between the trainer's and the engine's log-prob of a sampled token under the same weights.",
        AGREEMENT,
        (*MISMATCH, *PROBE),
        unit="nats",
        scale="log",
    ),
    Panel(
        "Mismatch of older weights",
        "Mean difference on tokens sampled by older weights, that is, how far training has moved on since.",
        AGREEMENT,
        (Line("train/train_rollout_logprob_abs_diff_stale"),),
        unit="nats",
        if_any=True,
    ),
    Panel(
        "Staleness",
        "How many weight versions the sampled tokens are behind the newest weights.",
        AGREEMENT,
        (Line("rollout/staleness/mean", "mean"), Line("rollout/staleness/max", "oldest", dashed=True)),
        unit="versions",
        kinds=WITH_STALENESS,
    ),
    Panel(
        "Generation speed",
        "Trained tokens per second per rollout GPU (or slot).",
        TIME,
        (Line("perf/tokens_per_gpu_per_sec"),),
        unit="tokens/s",
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "Requests per engine",
        "With --rollout-concurrency adaptive: the limit, which follows an engine's load, and what queues in it.",
        TIME,
        (
            Line("perf/engine_limit/mean", "limit"),
            Line("perf/engine_queue/mean", "in the engine's queue"),
            Line("perf/engine_queue/max", "longest queue", dashed=True),
        ),
        unit="requests",
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "KV cache in use",
        "With --rollout-concurrency adaptive: the fraction of an engine's KV cache that running requests use.",
        TIME,
        (Line("perf/engine_kv_use/mean", "mean"), Line("perf/engine_kv_use/max", "largest", dashed=True)),
        scale="share",
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "Training speed",
        "Floating-point operations per second per rank, over the entire training call.",
        TIME,
        (Line("perf/actor_train_tflops"),),
        unit=TERA,
        in_picture=False,
    ),
)


def drawn_panels(record: RunRecord) -> list[Drawn]:
    """Returns the panels for which this run has data, in table order."""
    keys = sorted({key for row in record.rows for key in row})
    made = (_drawn(panel, record.rows, keys) for panel in PANELS if record.kind in panel.kinds)
    return [drawn for drawn in made if drawn is not None]


def _drawn(panel: Panel, rows: Sequence[Row], keys: Sequence[str]) -> Drawn | None:
    found = [(line, one) for line in panel.lines for one in _series(line, keys, rows)]
    longest = max((len(one.curve.steps) for _, one in found), default=0)
    series = [one for line, one in found if not line.unless_alone or len(one.curve.steps) > 1 or longest == 1]
    if not series or (panel.if_any and not any(any(one.curve.values) for one in series)):
        return None
    if all(abs(value) < panel.rounding for one in series for value in one.curve.values):
        return None
    series = _merged(series)
    if panel.unit == TERA and max(max(one.curve.values) for one in series) < SMALL_TERA:
        panel = replace(panel, unit="GFLOP/s")
        series = [replace(one, curve=Curve(one.curve.steps, [1e3 * v for v in one.curve.values])) for one in series]
    scale = panel.scale
    if scale == "log":  # a log scale cannot show zeros
        positive = [replace(one, curve=_positive(one.curve)) for one in series]
        series = [one for one in positive if one.curve] or series
        scale = "log" if any(one.curve for one in positive) else "zero"
    band = None
    if panel.band is not None:
        least, greatest = (curve(rows, key) for key in panel.band)
        band = (least, greatest) if least and greatest else None
    lost = sorted(
        {step for line in panel.lines for key, _ in _named(line, keys) for step in steps_not_finite(rows, key)}
    )
    return Drawn(panel, series, scale, band, lost)


def _merged(series: Sequence[Series]) -> list[Series]:
    """Merges identical lines into one with a combined label."""
    out: list[Series] = []
    for one in series:
        same = next((i for i, other in enumerate(out) if other.curve == one.curve), None)
        if same is None:
            out.append(one)
        else:
            out[same] = replace(out[same], label=f"{out[same].label} and {one.label}", is_joined=True)
    return out


def _series(line: Line, keys: Sequence[str], rows: Sequence[Row]) -> Iterator[Series]:
    for key, label in _named(line, keys):
        if values := curve(rows, key):
            yield Series(label, values, line.dashed)


def _named(line: Line, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (metric, label) for each of the run's metrics that matches the line's key."""
    if "*" not in line.key:
        yield line.key, line.label
        return
    before, _, after = line.key.partition("*")
    for key in keys:
        if not after:
            name = eval_name(key)
            if name is not None:
                yield key, line.label.replace("*", name)
        elif match := re.fullmatch(f"{re.escape(before)}([^/]+?){re.escape(after)}(\\d*)", key):
            yield key, line.label.replace("*", match[1]) + match[2]


def _positive(whole: Curve) -> Curve:
    kept = [(step, value) for step, value in zip(whole.steps, whole.values, strict=True) if value > 0]
    return Curve([step for step, _ in kept], [value for _, value in kept])
