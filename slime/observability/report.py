"""The report of a run: one picture and one page of text, made from `metrics.jsonl` alone.

The picture answers four questions: does the reward rise, does held-out accuracy follow, do trainer and engine agree on
the probabilities, and where does the time go. It can be made while the run goes on, or of a run that died.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import DataError
from slime.observability.sinks import AXES, eval_name, read_jsonl

Curve = tuple[list[float], list[float]]
"""Steps and values."""

REWARD_KEY = "rollout/raw_reward"
MISMATCH_KEYS = {
    "train/train_rollout_logprob_abs_diff_max": "worst token",
    "train/train_rollout_logprob_abs_diff_p99": "99 % of tokens",
    "train/train_rollout_logprob_abs_diff_current": "mean",
}
STEP_PARTS = {
    "rollout": ("perf/rollout_time", "perf/generation_wait_time"),
    "memory hand-over": ("perf/offload_rollout_time", "perf/wake_up_time", "perf/sleep_time"),
    "train": ("perf/train_time",),
    "weight sync": ("perf/update_weights_time",),
    "save": ("perf/save_model_time",),
    "eval": ("perf/eval_time",),
}
"""Parts of a step that do not contain each other, in the order of the loop, and the metrics that sum to each."""
COLORS = ("#4C78A8", "#BAB0AC", "#F58518", "#54A24B", "#B279A2", "#9D755D")
REWARD, EVAL = "#4C78A8", ("#54A24B", "#E45756", "#B279A2", "#F58518")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the report says in words."""

    num_rollouts: int
    reward: tuple[float, float] | None
    """Mean reward of the first and of the last rollout."""
    evals: Mapping[str, tuple[float, float]]
    """Dataset -> score before (first evaluation) and after (last)."""
    worst_mismatch: float | None
    """Largest |log-prob of the trainer - of the engine| over all tokens and steps, nats."""
    step_s: float | None
    """Mean seconds per step, all parts together."""
    wall_s: float
    """From the first logged step to the last."""


def curve(rows: Sequence[Mapping[str, float]], key: str) -> Curve:
    """Steps and finite values of one metric; of a step that was logged twice (a resume) the last."""
    points: dict[float, float] = {}
    for row in rows:
        if key in row and math.isfinite(row[key]):
            step = next((row[axis] for axis in AXES.values() if axis in row), None)
            if step is not None:
                points[step] = row[key]
    ordered = sorted(points.items())
    return [s for s, _ in ordered], [v for _, v in ordered]


def eval_names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Datasets that were evaluated."""
    return sorted({name for row in rows for key in row if (name := eval_name(key)) is not None})


def summarize(metrics_jsonl: Path) -> RunSummary:
    """Reads a metrics file. Raises `DataError` if it holds no step."""
    rows = read_jsonl(metrics_jsonl)
    if not rows:
        raise DataError(f"got no step in {metrics_jsonl}, so there is nothing to report")
    reward = curve(rows, REWARD_KEY)[1]
    evals = {name: curve(rows, f"eval/{name}")[1] for name in eval_names(rows)}
    mismatches = next((c for c in (curve(rows, k)[1] for k in MISMATCH_KEYS) if c), [])
    times = [t for t in _step_times(rows) if t > 0]
    return RunSummary(
        num_rollouts=len(reward),
        reward=(reward[0], reward[-1]) if reward else None,
        evals={name: (values[0], values[-1]) for name, values in evals.items() if values},
        worst_mismatch=max(mismatches) if mismatches else None,
        step_s=sum(times) / len(times) if times else None,
        wall_s=max(r["time"] for r in rows) - min(r["time"] for r in rows),
    )


def _step_times(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Seconds of each step: as measured around all of it, else the sum of its parts."""
    measured = curve(rows, "perf/step_time")[1]
    if measured:
        return measured
    per_step: dict[float, float] = {}
    for part in _parts(rows).values():
        for step, value in part.items():
            per_step[step] = per_step.get(step, 0.0) + value
    return list(per_step.values())


def _parts(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[float, float]]:
    """Part -> rollout -> seconds, without the parts that this run does not have."""
    out: dict[str, dict[float, float]] = {}
    rows = [row for row in rows if AXES["perf"] in row]  # the evaluation before step 0 has an axis of its own
    for label, keys in STEP_PARTS.items():
        for key in keys:
            for step, value in zip(*curve(rows, key), strict=True):
                part = out.setdefault(label, {})
                part[step] = part.get(step, 0.0) + value
    return out


def summary_text(summary: RunSummary, title: str = "") -> str:
    """The summary as markdown."""
    lines = [f"# {title}", ""] if title else []
    lines += ["| | before | after | change |", "|---|---|---|---|"]
    pairs = {f"held-out score, {name}": pair for name, pair in summary.evals.items()}
    if summary.reward is not None:
        pairs["reward of a rollout"] = summary.reward
    lines += [f"| {name} | {a:.3f} | {b:.3f} | {b - a:+.3f} |" for name, (a, b) in pairs.items()]
    lines += ["", f"- rollouts: {summary.num_rollouts}"]
    if summary.step_s is not None:
        lines.append(f"- time per step: {summary.step_s:.1f} s")
    if summary.worst_mismatch is not None:
        lines.append(f"- largest train-inference mismatch: {summary.worst_mismatch:.2e} nats")
    lines.append(f"- from the first logged step to the last: {summary.wall_s:.0f} s")
    return "\n".join(lines) + "\n"


def write_report(metrics_jsonl: Path, out_png: Path, *, title: str = "slime run") -> RunSummary:
    """Draws the picture into `out_png` and the text beside it (`.md`); returns the summary.

    `title`: model and task. Raises `DataError` if there is no step to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summary = summarize(metrics_jsonl)
    rows = read_jsonl(metrics_jsonl)
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: its global state is not ours to change
    figure.suptitle(title, fontsize=15, fontweight="bold")
    (reward, evaluation), (mismatch, parts) = figure.subplots(2, 2)
    _draw_reward(reward, rows)
    _draw_eval(evaluation, rows)
    _draw_mismatch(mismatch, rows)
    _draw_parts(parts, rows)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, facecolor="white")
    out_png.with_suffix(".md").write_text(summary_text(summary, title))
    return summary


def _style(axes: Any, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.grid(True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="grey")


def _draw_reward(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "Reward of the samples trained on", "rollout", "mean reward")
    steps, values = curve(rows, REWARD_KEY)
    if not steps:
        return _empty(axes)
    axes.plot([s + 1 for s in steps], values, "o-", color=REWARD, markersize=4)
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.02)


def _draw_eval(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "Held-out score", "rollouts trained", "score")
    names = eval_names(rows)
    if not names:
        return _empty(axes)
    highest = 1.0
    for color, name in zip(EVAL * len(names), names, strict=False):
        steps, values = curve(rows, f"eval/{name}")
        steps = [s + 1 for s in steps]  # an evaluation carries the rollout that it follows, -1 before the first
        axes.plot(steps, values, "o-", color=color, label=name, markersize=5)
        highest = max([highest, *values])
        ends = (0, -1) if len(values) > 1 else (0,)
        for i in ends if len(names) == 1 else ():
            place = (0, 9) if values[i] < 0.9 * highest else (0, -16)
            axes.annotate(f"{values[i]:.3f}", (steps[i], values[i]), place, textcoords="offset points", ha="center")
    axes.set_ylim(0, 1.02 * highest)
    axes.margins(x=0.08)
    axes.legend(loc="lower right", frameon=False)


def _draw_mismatch(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "Train-inference mismatch", "step", "|difference|, nats")
    drawn = False
    for color, (key, label) in zip((EVAL[1], EVAL[3], REWARD), MISMATCH_KEYS.items(), strict=True):
        steps, values = curve(rows, key)
        positive = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0]
        if positive:
            xs, ys = [s + 1 for s, _ in positive], [v for _, v in positive]
            axes.plot(xs, ys, "o-", color=color, label=label, markersize=4)
            drawn = True
    if not drawn:
        return _empty(axes)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 20), high * 3)  # room for the legend, and never a scale without a tick
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=9)


def _draw_parts(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "Where the time of a step goes", "rollout", "seconds")
    parts = _parts(rows)
    if not parts:
        return _empty(axes)
    bottom = {step: 0.0 for part in parts.values() for step in part}
    colors = dict(zip(STEP_PARTS, COLORS, strict=True))
    for label, part in parts.items():
        xs = [step + 1 for step in part]
        axes.bar(xs, list(part.values()), bottom=[bottom[s] for s in part], label=label, color=colors[label], width=0.7)
        for step, value in part.items():
            bottom[step] += value
    axes.set_ylim(0, 1.3 * max(bottom.values()) or 1.0)
    axes.legend(loc="upper right", ncols=4, frameon=False, fontsize=9)
