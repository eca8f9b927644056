"""The text report: values before and after training, time per step, and findings."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.core.text import listed, step_name
from slime.observability.health import Finding, findings, learns_from_rewards
from slime.observability.report.markup import short
from slime.observability.report.record import (
    OTHER,
    STEP_PARTS,
    Row,
    RunKind,
    RunRecord,
    curve,
    read_run,
    seconds_without_evaluation,
    standing_rows,
    steps_not_finite,
)
from slime.observability.samples import DROPPED_ROWS, FILE_NAME, samples_markdown
from slime.observability.sinks import HELD_OUT_LOSS, eval_name, read_jsonl

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
    cost: Cost | None = None

    @property
    def telling_mismatches(self) -> Mapping[str, float]:
        """The mismatches of fresh responses, if logged. The training batches of an asynchronous run were sampled with
        older weights."""
        return {key: value for key, value in self.mismatches.items() if key.startswith("probe/")} or self.mismatches

    @property
    def worst_mismatch(self) -> float | None:
        return max(self.mismatches.values(), default=None)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run has cost, in hours of its GPUs (on a CPU, of its slots). Every second of every GPU has one cause."""

    num_trainers: int
    num_engines: int
    num_gpus: int
    """GPUs of the run: fewer than trainers and engines together if they share some."""
    unit: str
    causes: Mapping[str, float]
    """Cause -> hours: starting, steps by part, steps that a resume discarded, and time lost with a launch."""
    idle_trainers: float
    """Hours in which trainers waited for samples; part of `causes`."""
    idle_engines: float
    """Hours in which engines had no request, by `perf/engine_idle_ratio`; likewise."""

    @property
    def total(self) -> float:
        return sum(self.causes.values())


STARTING, REPEATED, LOST = "starting", "steps that a resume discarded", "time between the last step and the next launch"


def cost_of(record: RunRecord, rows: Sequence[Row]) -> Cost | None:
    """Returns what the run has cost, or None if its record does not say. `rows`: all, also those of discarded steps."""
    settings, begins = record.settings, [start.time_s for start in record.starts]
    timed = [row for row in rows if "time" in row and "perf/step_time" in row]
    if not timed or not begins or any(begin is None for begin in begins):
        return None
    trainers = int(settings.get("actor_num_nodes") or 0) * int(settings.get("actor_num_gpus_per_node") or 0)
    trainers = 0 if settings.get("debug_rollout_only") else trainers
    engines = 0 if settings.get("debug_train_only") else int(settings.get("rollout_num_gpus") or 0)
    num_gpus = max(trainers, engines) if settings.get("colocate") else trainers + engines
    seconds: dict[str, float] = defaultdict(float)
    idle_trainers_s = idle_engines_s = 0.0
    counts = {id(row) for row in standing_rows(rows, record.starts)}
    idle = {step: value for step, value in zip(*_points(rows, "perf/engine_idle_ratio"), strict=True)}
    for number, begin in enumerate(begins):
        assert begin is not None, "checked above"
        end = begins[number + 1] if number + 1 < len(begins) else None
        own = [row for row in timed if row["time"] >= begin and (end is None or row["time"] < end)]
        for row in own:
            seconds[STARTING] += row.get("startup/total_time", 0.0)
            parts = {part: sum(row.get(key, 0.0) for key in keys) for part, keys in STEP_PARTS.items()}
            parts[OTHER] = max(0.0, row["perf/step_time"] - sum(parts.values()))
            for part, part_s in parts.items():
                seconds[part if id(row) in counts else REPEATED] += part_s
            idle_trainers_s += parts["wait for batch"]
            idle_engines_s += row["perf/step_time"] * idle.get(row.get("rollout/step", -1.0), 0.0)
        if end is not None:
            seconds[LOST] += end - max([row["time"] for row in own], default=begin)
    hours = {cause: value * num_gpus / 3600 for cause, value in seconds.items() if value > 0}
    unit = "GPU-hours" if settings.get("device") == "cuda" else "slot-hours"
    idle_hours = idle_trainers_s * trainers / 3600, idle_engines_s * engines / 3600
    return Cost(trainers, engines, num_gpus, unit, hours, *idle_hours)


def _points(rows: Sequence[Row], key: str) -> tuple[Sequence[float], Sequence[float]]:
    found = curve(rows, key)
    return found.steps, found.values


def cost_text(cost: Cost) -> dict[str, str]:
    """Returns the lines of the text report about the cost."""
    causes = sorted(cost.causes.items(), key=lambda one: -one[1])
    parts = ", ".join(f"{cause} {short(hours)} ({hours / cost.total:.0%})" for cause, hours in causes)
    out = {"cost": f"{short(cost.total)} {cost.unit} of {cost.num_gpus} ({parts})"}
    if cost.num_trainers and cost.num_engines:
        out["cost of idle parts"] = (
            f"trainers waiting for samples {short(cost.idle_trainers)} {cost.unit}, engines without a request "
            f"{short(cost.idle_engines)} {cost.unit}"
        )
    return out


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
        cost=cost_of(record, read_jsonl(record.path / "metrics.jsonl")),
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
    out |= cost_text(summary.cost) if summary.cost is not None and summary.cost.total else {}
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
