"""Run folders that look like real ones, of every kind, made in milliseconds: for the report and what shows it."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.observability.samples import FILE_NAME, PICKS, SamplesFile, ShownSample

BEGIN_S = 1_767_603_600.0
"""Unix time of the first start, 2026-01-05 09:00 UTC."""
STEP_S = 20.0
Rows = list[dict[str, float]]
HOSTILE = '</pre><script>document.title="owned"</script><img src=x onerror=alert(1)>\x1b[31m\u202e'
"""What a response must never do to a page."""


def made_run(folder: Path, kind: str = "sync", *, num_steps: int = 30, resumed_at: int | None = None) -> Path:
    """Writes a run folder. `kind`: "sync", "async", "sft" or "evaluation"; returns `folder`."""
    rng = random.Random(7)
    (folder / "traces").mkdir(parents=True)
    rows = list({"sync": _rl, "async": _rl, "sft": _sft, "evaluation": _evaluation}[kind](rng, num_steps, kind))
    if resumed_at is not None:
        rows = _with_resume(rows, resumed_at)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = [BEGIN_S - 40]
    if resumed_at is not None:
        times.append(next(row["time"] for row in rows if "resumed" in row) - 35)
    script = "train_async.py" if kind == "async" else "train.py"
    (folder / "run.json").write_text(json.dumps({"starts": [_start(script, at_s) for at_s in times]}))
    (folder / "args.json").write_text(json.dumps(_settings(kind)))
    if kind != "sft":
        SamplesFile(folder / FILE_NAME).append(_samples(num_steps))
    _trace(folder / "traces" / "driver-100.json", rows, overlap=kind == "async")
    return folder


def _with_resume(rows: Rows, step: int) -> Rows:
    """The run was killed three steps after `step - 1` was saved, and did them again, a little differently."""
    last = next(i for i, row in enumerate(rows) if row.get("rollout/step", -1) == step + 3)
    again = [dict(row) for row in rows if _step(row) >= step]
    again[0]["resumed"] = 1.0
    for row in again:
        row["time"] += 3 * STEP_S + 300
    return rows[:last] + again


def _step(row: dict[str, float]) -> float:
    return next(row[axis] for axis in ("rollout/step", "train/step", "eval/step") if axis in row)


def _rl(rng: random.Random, num_steps: int, kind: str) -> Iterator[dict[str, float]]:
    """GRPO that learns, in three kinds of rows for each step, and an evaluation before and after."""
    at_s, is_async = BEGIN_S, kind == "async"
    yield {"time": at_s, "eval/step": -1, "eval/sums": 0.26, "eval/sums-pass@4": 0.45, "eval/sums-truncated_ratio": 0.3}
    for step in range(num_steps):
        done, evaluates = step / max(num_steps - 1, 1), step == num_steps - 1 or step % 10 == 9
        parts = {"perf/rollout_wait_time": 5.5 - 2 * done, "perf/train_time": 11.0, "perf/update_weights_time": 0.8}
        parts |= {"perf/eval_time": 13.0} if evaluates else {}
        whole = {"perf/step_time": sum(parts.values()) + 0.9}
        at_s += whole["perf/step_time"]
        reward = min(0.97, 0.2 + 0.65 * (1 - math.exp(-4 * done)) + rng.gauss(0, 0.03))
        mean_length, mismatch = 9 - 2.5 * done + rng.gauss(0, 0.25), 2e-2 * math.exp(rng.gauss(-done, 0.1))
        age = {"rollout/staleness/mean": 1.1 + rng.random(), "rollout/staleness/max": float(rng.choice([2, 3, 3, 4]))}
        yield {
            "time": at_s - 12,
            "rollout/step": step,
            "rollout/raw_reward": max(0.0, reward),
            "rollout/raw_reward_std": 0.4,
            "rollout/response_len/mean": mean_length,
            "rollout/response_len/median": mean_length - 0.6,
            "rollout/response_len/max": 12.0,
            "rollout/response_len/min": float(rng.choice([2, 3, 3, 4])),
            "rollout/truncated_ratio": max(0.0, 0.34 - 0.3 * done + rng.gauss(0, 0.02)),
            "rollout/zero_std/ratio": min(1.0, max(0.0, 0.12 + 0.4 * done + rng.gauss(0, 0.06))),
            "rollout/num_filtered_groups": 0.0,
            "rollout/num_failed_groups": 0.0,
            "perf/tokens_per_gpu_per_sec": 260 + rng.gauss(0, 12),
            **(age if is_async else {}),
        }
        stale = {"train/train_rollout_logprob_abs_diff_stale": 2.2 * mismatch}
        own = {
            "train/train_rollout_logprob_abs_diff_max": 14 * mismatch,
            "train/train_rollout_logprob_abs_diff_p99": 6 * mismatch,
            "train/train_rollout_logprob_abs_diff_current": mismatch,
        }
        yield {
            "time": at_s - 2,
            "train/step": step,
            "train/loss": rng.gauss(-0.01, 0.02),
            "train/pg_loss": rng.gauss(-0.01, 0.02),
            "train/entropy_loss": 0.75 * math.exp(-1.3 * done) + rng.gauss(0, 0.01),
            "train/ppo_kl": abs(rng.gauss(0, 0.002)),
            "train/kl_loss": 0.05 * done + abs(rng.gauss(0, 0.002)),
            "train/grad_norm": 1.4 + abs(rng.gauss(0, 0.35)) + (4.5 if step == num_steps // 3 else 0),
            "train/lr-pg_0": 5e-5 * min(1.0, (step + 1) / 4),
            "train/pg_clipfrac": abs(rng.gauss(0.008, 0.004)),
            "perf/actor_train_tflops": 0.11 + rng.gauss(0, 0.004),
            **(stale if is_async and step else own),
        }
        probe = {f"probe/{k.partition('/')[2].replace('_current', '_mean')}": v for k, v in own.items()}
        if evaluates:
            score = 0.26 + 0.55 * (1 - math.exp(-4 * done))
            scores = {
                "eval/sums": score,
                "eval/sums-pass@4": score + 0.1,
                "eval/sums-truncated_ratio": 0.3 - 0.25 * done,
            }
            yield {"time": at_s - 0.1, "eval/step": step, **scores}
        yield {"time": at_s, "rollout/step": step, **parts, **whole, **(probe if is_async else {})}


def _sft(rng: random.Random, num_steps: int, kind: str) -> Iterator[dict[str, float]]:
    """Supervised fine-tuning with a held-out loss that ends up above its least value."""
    for step in range(num_steps):
        at_s, done = BEGIN_S + 6.0 * (step + 1), step / max(num_steps - 1, 1)
        lengths = {"rollout/total_len/mean": rng.gauss(410, 12), "rollout/trained_tokens": rng.gauss(9000, 300)}
        unused = {"rollout/raw_reward": 0.0, "rollout/truncated_ratio": 0.0, "rollout/zero_std/ratio": 1.0}
        unused["rollout/num_filtered_groups"] = float(step % 17 == 3)
        yield {"time": at_s - 5, "rollout/step": step, **lengths, **unused, "perf/tokens_per_gpu_per_sec": 900.0}
        yield {
            "time": at_s - 0.5,
            "train/step": step,
            "train/loss": 0.55 + 1.9 * math.exp(-5 * done) + rng.gauss(0, 0.04),
            "train/grad_norm": 0.8 + abs(rng.gauss(0, 0.2)),
            "train/lr-pg_0": 2e-5 * min((step + 1) / 8, 1.02 - done),
            "perf/actor_train_tflops": 0.11 + rng.gauss(0, 0.004),
        }
        if step % 10 == 9 or step == num_steps - 1:
            loss = 0.82 + 1.7 * math.exp(-5 * done) + 0.08 * done
            yield {"time": at_s - 0.2, "eval/step": step, "eval/chats-loss": loss}
        parts = {"perf/rollout_wait_time": 0.3, "perf/train_time": 5.1}
        yield {"time": at_s, "rollout/step": step, **parts, "perf/step_time": 5.6}


def _evaluation(rng: random.Random, num_steps: int, kind: str) -> Iterator[dict[str, float]]:
    """One evaluation of two datasets."""
    lengths = {"eval/gsm8k/response_len/mean": 180.0, "eval/math/response_len/mean": 402.0}
    scores = {
        "eval/gsm8k": 0.41,
        "eval/math": 0.18,
        "eval/gsm8k-truncated_ratio": 0.05,
        "eval/math-truncated_ratio": 0.2,
    }
    yield {"time": BEGIN_S, "eval/step": -1, **scores, **lengths}


def _start(script: str, at_s: float) -> dict[str, Any]:
    return {
        "run_id": "made",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(at_s)),
        "command": [script, "--hf-checkpoint", "models/smollm2-135m-instruct", "--prompt-data", "sums/train.jsonl"],
        "versions": {"python": "3.11.7", "torch": "2.11.0", "sglang": "0.5.16", "ray": "2.60.0", "numpy": None},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "host": {"name": "laptop", "num_usable_cpus": 2, "memory_bytes": 24 << 30, "num_gpus": 0},
        "without_effect": {},
    }


def _settings(kind: str) -> dict[str, Any]:
    given = {
        "hf_checkpoint": "models/smollm2-135m-instruct",
        "prompt_data": "sums/train.jsonl",
        "num_rollout": 30,
        "lr": 5e-5,
        "advantage_estimator": "grpo",
        "loss_type": "sft_loss" if kind == "sft" else "policy_loss",
    }
    defaults = {"rollout_temperature": 1.0, "eps_clip": 0.2, "use_opd": False, "seed": 1234}
    megatron = {"num_layers": 30, "hidden_size": 576}
    origins = {name: "command line" for name in given} | {name: "default" for name in defaults}
    origins |= {f"megatron.{name}": "HF config" for name in megatron}
    return {"format": 1, **given, **defaults, "megatron": megatron, "idle": {}, "origins": origins}


def _samples(num_steps: int) -> Iterator[ShownSample]:
    """Best, worst and a random one of each step; one response is hostile."""
    for step in range(num_steps):
        for number, picked in enumerate(PICKS):
            right = picked == "best"
            answer = (
                HOSTILE if picked == "worst" and step == num_steps - 1 else f"The answer is {42 + number}.<|im_end|>"
            )
            yield ShownSample(
                kind="rollout",
                step=step,
                prompt="<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
                response=answer,
                reward=float(right),
                label="42",
                status="completed" if right else "truncated",
                response_length=8 + number,
                weight_version=step + 1,
                finish_reason="stop" if right else "length",
                picked=picked,
            )


def _trace(path: Path, rows: Rows, *, overlap: bool) -> None:
    """A driver's trace that fits the times of the rows. `overlap`: a step's samples were made while another trained."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 100, "args": {"name": "driver"}}]
    order = ("rollout_wait", "train", "update_weights", "eval")
    for row in rows:
        begin_s = row["time"] - row.get("perf/step_time", 0.0)
        for name in order:
            seconds = row.get(f"perf/{name}_time", 0.0)
            if seconds and "perf/step_time" in row:
                stamp = {"ts": round(begin_s * 1e6), "dur": round(seconds * 1e6)}
                events.append({"ph": "X", "name": name, "pid": 100, "tid": 0, **stamp, "args": {}})
                begin_s += seconds
                if name == "rollout_wait":
                    long_s = seconds + (8.0 if overlap else 0.0)
                    stamp = {"ts": round((begin_s - long_s) * 1e6), "dur": round(long_s * 1e6)}
                    events.append({"ph": "X", "name": "generation", "pid": 100, "tid": 1, **stamp, "args": {}})
    path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in events))
