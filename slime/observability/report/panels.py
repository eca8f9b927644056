"""The panels of a report: one table for all kinds of run. Panels without data are left out.

A line of a panel is one metric. `*` in its key stands for an evaluation dataset and makes a line for each dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slime.observability.report.record import Curve, Row, RunKind, RunRecord, curve
from slime.observability.sinks import eval_name

Scale = Literal["auto", "zero", "unit", "share", "percent", "log"]
"""auto: around the values; zero: from 0; unit: 0 to 1 if they fit; share: 0 to 100 %; percent: from 0, in %; log."""


@dataclass(frozen=True, slots=True)
class Line:
    key: str
    label: str = ""
    """`*` becomes the dataset. Empty if the panel's title is enough."""
    dashed: bool = False
    unless_alone: bool = False
    """Leave the line out if it has one step and another line has more."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    about: str
    """What the panel shows, and what to look for."""
    section: str
    lines: Sequence[Line]
    unit: str = ""
    scale: Scale = "zero"
    band: tuple[str, str] | None = None
    """Metrics of the minimum and the maximum around the first line."""
    if_any: bool = False
    """Leave the panel out if all values are zero."""
    flat_in_words: bool = False
    """If the values never change, a sentence says so instead of the panel."""
    rounding: float = 0.0
    """Leave the panel out if all values are below this, because they are rounding errors."""
    in_picture: bool = True
    """Whether `report.png` has the panel; the page has every panel."""
    kinds: frozenset[RunKind] = field(default_factory=lambda: frozenset(RunKind))


@dataclass(frozen=True, slots=True)
class Series:
    """A line with its data."""

    label: str
    curve: Curve
    dashed: bool = False
    is_joined: bool = False
    """Whether the series stands for several equal lines."""


@dataclass(frozen=True, slots=True)
class Drawn:
    panel: Panel
    series: Sequence[Series]
    scale: Scale
    band: tuple[Curve, Curve] | None = None

    @property
    def is_named(self) -> bool:
        """Whether the panel needs a legend."""
        return len(self.series) > 1 or self.band is not None or self.series[0].is_joined

    @property
    def in_words(self) -> bool:
        """Whether the panel is described in words, because no line changes."""
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
"""Kinds of run with responses and rewards. Fine-tuning logs both as zeros."""
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
"""Asynchronous runs compare fresh responses, because their batches are older than the trainer."""

PANELS: Sequence[Panel] = (
    Panel(
        "Loss",
        "The minimised loss: on the step's conversations before its update, on held-out ones after it. A held-out "
        "loss that rises again means overfitting.",
        LEARNING,
        (Line("train/loss", "trained"), Line("eval/*-loss", "held out: *")),
        unit="nats",
        scale="auto",
        kinds=SFT,
    ),
    Panel(
        "Reward",
        "Mean reward of the samples trained on, before any normalisation.",
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
        "How far an update, or training as a whole, moved the policy.",
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
        "Trained tokens of a sample: mean, and from the shortest to the longest.",
        SAMPLES,
        (Line("rollout/response_len/mean", "mean"), Line("rollout/response_len/median", "median", dashed=True)),
        unit="tokens",
        band=("rollout/response_len/min", "rollout/response_len/max"),
        flat_in_words=True,
    ),
    Panel(
        "Conversation length",
        "Mean tokens of a conversation, prompt included.",
        SAMPLES,
        (Line("rollout/total_len/mean"),),
        unit="tokens",
        flat_in_words=True,
    ),
    Panel(
        "Truncated",
        "Share of the samples that a length limit ended.",
        SAMPLES,
        (Line("rollout/truncated_ratio", "trained"), Line("eval/*-truncated_ratio", "held out: *", dashed=True)),
        scale="share",
        kinds=SAMPLED,
    ),
    Panel(
        "Groups without variance",
        "Share of the groups whose rewards are all equal: a group-relative advantage learns nothing from them.",
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
        "Filtered on purpose, given up, or issued again after a failure.",
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
        "The minimised loss. Its size means little; sudden jumps matter.",
        OPTIMIZER,
        (Line("train/loss", "whole"), Line("train/pg_loss", "policy part", dashed=True)),
        scale="auto",
        rounding=1e-6,
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "Critic loss",
        "Distance of the critic's values from the returns.",
        OPTIMIZER,
        (Line("train/critic-value_loss"),),
    ),
    Panel(
        "Gradient norm",
        "Global norm before clipping. A spike means a bad batch, a rise a learning rate that is too high.",
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
        "Share of the tokens whose ratio was clipped, or that a correction left out.",
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
        "Difference of the trainer's and the engine's log-prob of a sampled token under the same weights.",
        AGREEMENT,
        (*MISMATCH, *PROBE),
        unit="nats",
        scale="log",
    ),
    Panel(
        "Mismatch of older weights",
        "Mean difference on tokens that older weights sampled: how far training has moved on since.",
        AGREEMENT,
        (Line("train/train_rollout_logprob_abs_diff_stale"),),
        unit="nats",
        if_any=True,
    ),
    Panel(
        "Staleness",
        "By how many weight versions the sampled tokens are older than the newest weights.",
        AGREEMENT,
        (Line("rollout/staleness/mean", "mean"), Line("rollout/staleness/max", "oldest", dashed=True)),
        unit="versions",
        kinds=WITH_STALENESS,
    ),
    Panel(
        "Generation speed",
        "Trained tokens per second and rollout GPU (or slot).",
        TIME,
        (Line("perf/tokens_per_gpu_per_sec"),),
        unit="tokens/s",
        in_picture=False,
        kinds=SAMPLED,
    ),
    Panel(
        "Training speed",
        "Floating-point operations per second and rank, over the whole training call.",
        TIME,
        (Line("perf/actor_train_tflops"),),
        unit=TERA,
        in_picture=False,
    ),
)


def drawn_panels(record: RunRecord) -> list[Drawn]:
    """Returns the panels with data in this run, in the order of the table."""
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
    if scale == "log":  # which cannot show zeros
        positive = [replace(one, curve=_positive(one.curve)) for one in series]
        series = [one for one in positive if one.curve] or series
        scale = "log" if any(one.curve for one in positive) else "zero"
    band = None
    if panel.band is not None:
        least, greatest = (curve(rows, key) for key in panel.band)
        band = (least, greatest) if least and greatest else None
    return Drawn(panel, series, scale, band)


def _merged(series: Sequence[Series]) -> list[Series]:
    """Merges equal lines into one, with both names."""
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
    """Yields (metric, label) of each metric of this run that the line stands for."""
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
