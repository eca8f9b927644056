"""The text report: values before and after training, time per step, and findings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.core.text import listed, step_name
from slime.observability.health import Finding, findings, learns_from_rewards
from slime.observability.report.markup import short
from slime.observability.report.record import (
    Row,
    RunKind,
    RunRecord,
    curve,
    read_run,
    seconds_without_evaluation,
    steps_not_finite,
)
from slime.observability.samples import DROPPED_ROWS, FILE_NAME, samples_markdown
from slime.observability.sinks import HELD_OUT_LOSS, eval_name

NUM_NAMED = 5
"""Maximum number of dropped rows listed for a dataset."""
REWARD_KEY = "rollout/raw_reward"
MEAN_REWARD = "mean reward of a step"
WORST_TOKEN = re.compile(r"(train|probe)/train_rollout_logprob_abs_diff_max")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The content of the text report."""

    kind: RunKind
    num_rollouts: int
    """Number of steps that generated samples or, for SFT, fetched conversations."""
    reward: tuple[float, float] | None
    """Mean reward of the first and last step."""
    evals: Mapping[str, tuple[float, float]]
    """Dataset -> score of the first and last evaluation."""
    loss: tuple[float, float] | None
    """SFT only: loss of the first and last step."""
    eval_losses: Mapping[str, tuple[float, float]]
    """Dataset -> held-out loss of the first and last evaluation."""
    mismatches: Mapping[str, float]
    """Metric -> largest absolute difference between trainer and engine log-prob of any token in the run, in nats."""
    step_s: float | None
    """Mean time per step, excluding evaluations."""
    wall_s: float
    """Time from the first to the last logged step, including pauses between launches."""
    resumed_at: Sequence[int]
    """First step of each launch that continued another one."""
    findings: Sequence[Finding]
    once: frozenset[str] = frozenset()
    """Names in `before_and_after` with a single value, which is neither before nor after."""
    not_finite: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Metric -> steps at which it was NaN or infinite."""
    dropped_rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Dataset -> its dropped rows as `FILE:LINE`, in the order in which they were found."""

    @property
    def telling_mismatches(self) -> Mapping[str, float]:
        """The mismatches of fresh responses, if logged. The training batches of an asynchronous run were sampled with
        older weights."""
        return {key: value for key, value in self.mismatches.items() if key.startswith("probe/")} or self.mismatches

    @property
    def worst_mismatch(self) -> float | None:
        return max(self.mismatches.values(), default=None)


def summarize(run_dir: Path) -> RunSummary:
    """Reads and summarizes a run folder. Raises `DataError` if no step was logged."""
    return summary_of(read_run(run_dir))


def summary_of(record: RunRecord) -> RunSummary:
    rows, is_sft = record.rows, record.kind is RunKind.SFT
    losses = {match[1]: key for row in rows for key in row if (match := HELD_OUT_LOSS.fullmatch(key))}
    evals = {name: key for row in rows for key in row if (name := eval_name(key)) is not None}
    seconds = seconds_without_evaluation(rows)
    times = [row["time"] for row in rows if "time" in row]
    made = RunSummary(
        kind=record.kind,
        num_rollouts=len({row["rollout/step"] for row in rows if "rollout/step" in row}),
        reward=None if is_sft else _ends(rows, REWARD_KEY),
        evals={name: ends for name in sorted(evals) if (ends := _ends(rows, evals[name]))},
        loss=_ends(rows, "train/loss") if is_sft else None,
        eval_losses={name: ends for name in sorted(losses) if (ends := _ends(rows, losses[name]))},
        mismatches=_largest(rows),
        step_s=sum(seconds) / len(seconds) if seconds else None,
        wall_s=max(times) - min(times) if times else 0.0,
        resumed_at=record.resumed_at,
        findings=[
            *findings(rows, learns_from_rewards=learns_from_rewards(record.settings)),
            *_untrained(rows, record.settings),
        ],
        not_finite={key: steps for key in sorted({k for row in rows for k in row}) if (steps := _lost(rows, key))},
        dropped_rows=_dropped_rows(record.path),
    )
    keys = {f"held-out score, {name}": key for name, key in evals.items()}
    keys |= {f"held-out loss, {name}": key for name, key in losses.items()}
    keys |= {MEAN_REWARD: REWARD_KEY, "loss": "train/loss"}
    return replace(made, once=frozenset(n for n in before_and_after(made) if len(curve(rows, keys[n]).steps) == 1))


def _lost(rows: Sequence[Row], key: str) -> Sequence[int]:
    return () if key == "time" else steps_not_finite(rows, key)


def _untrained(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Finding]:
    """Returns a finding if no step had a gradient. Only known at the end: a first step without one is harmless."""
    norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    if not norms or any(norms):
        return []
    decay = settings.get("megatron", {}).get("weight_decay")
    outcome = (
        f"only weight decay (--weight-decay {decay}) changed weights"
        if decay and not settings.get("lora_rank")  # a new adapter is zero, with or without decay
        else "no weight changed; an export equals the initial model"
    )
    text = f"the gradient norm was 0 in every step, so {outcome}. Check the rewards and advantages of the samples"
    return [Finding("nothing trained", len(norms) - 1, text)]


def _dropped_rows(run_dir: Path) -> dict[str, list[str]]:
    file = run_dir / DROPPED_ROWS
    found: dict[str, list[str]] = {}
    for row in map(json.loads, file.read_text().splitlines() if file.is_file() else ()):
        name = "training data" if row["dataset"] is None else str(row["dataset"])
        found.setdefault(name, []).append(f"{row['file']}:{row['line']}")
    return found


def _ends(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    values = curve(rows, key)
    return (values.first, values.last) if values else None


def _largest(rows: Sequence[Row]) -> dict[str, float]:
    """Returns each metric's maximum over all rows, since rows of one step may differ. NaN counts as the largest."""
    found: dict[str, float] = {}
    for row in rows:
        for key in filter(WORST_TOKEN.fullmatch, row):
            found[key] = max((found.get(key, -math.inf), row[key]), key=lambda v: (math.isnan(v), v))
    return found


def summary_text(summary: RunSummary, title: str = "") -> str:
    lines = [f"# {title}", ""] if title else []
    pairs = before_and_after(summary)
    if summary.kind is RunKind.EVALUATION:
        lines += [f"- {name}: {value:.3f}" for name, (value, _) in pairs.items()]
    elif pairs:
        changed = {name: ends for name, ends in pairs.items() if name not in summary.once}
        rows = [f"| {_cell(name)} | {a:.3f} | {b:.3f} | {b - a:+.3f} |" for name, (a, b) in changed.items()]
        lines += ["| | before | after | change |", "|---|---|---|---|", *rows, ""] if rows else []
        lines += [f"- {name}: {pairs[name][0]:.3f} (measured once)" for name in pairs if name in summary.once]
    lines += [f"- {name}: {value}" for name, value in facts(summary).items()]
    lines += ["", "## Warnings", ""] if summary.findings else ["- warnings: none"]
    lines += [f"- {finding_text(one)}" for one in summary.findings]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def before_and_after(summary: RunSummary) -> dict[str, tuple[float, float]]:
    """Returns name -> (first, last) value, the most important ones first."""
    pairs = {f"held-out score, {name}": ends for name, ends in summary.evals.items()}
    pairs |= {f"held-out loss, {name}": ends for name, ends in summary.eval_losses.items()}
    if summary.reward is not None:
        pairs[MEAN_REWARD] = summary.reward
    if summary.loss is not None:
        pairs["loss"] = summary.loss
    return pairs


def facts(summary: RunSummary) -> dict[str, str]:
    out = {"kind": summary.kind.value}
    if summary.kind is not RunKind.EVALUATION:
        out["steps"] = f"{summary.num_rollouts:,}"
    if summary.step_s is not None:
        out["mean time per step, without evaluation"] = f"{short(summary.step_s)} s"
    for key, value in summary.mismatches.items():
        whose = ", of fresh responses" if key.startswith("probe/") else ""
        if not whose and len(summary.mismatches) > 1:
            whose = ", of batches sampled by the newest weights"
        out[f"largest train-inference mismatch{whose}"] = f"{value:.2e} nats (`{key}`)"
    for name, rows in summary.dropped_rows.items():
        more = f" and {len(rows) - NUM_NAMED:,} more" if len(rows) > NUM_NAMED else ""
        which = ", ".join(rows[:NUM_NAMED])
        out[f"rows dropped, {name}"] = f"{len(rows):,} ({which}{more}; the reasons are in `{DROPPED_ROWS}`)"
    out["from the first logged step to the last"] = f"{summary.wall_s:,.0f} s"
    for key, steps in summary.not_finite.items():
        out[f"NaN or infinite, so not in the curves: `{key}`"] = listed([step_name(step) for step in steps])
    if summary.resumed_at:
        out["resumed with step"] = ", ".join(map(str, summary.resumed_at))
    return out


def finding_text(finding: Finding) -> str:
    """Describes a finding, with its steps and the values of the last step."""
    until = "; in the end, " if finding.last_step is None else f", resolved at step {finding.last_step}; before that, "
    return f"{finding.kind}, detected at step {finding.step}{until}{finding.text}"


def report_markdown(record: RunRecord, summary: RunSummary, title: str, *, max_samples: int = 8) -> str:
    text = summary_text(summary, title)
    table = samples_markdown(record.path / FILE_NAME, max_samples, fine_tuning=record.kind is RunKind.SFT)
    return f"{text}\n{table}" if table else text
