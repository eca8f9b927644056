"""Where logged steps go: console, JSONL, TensorBoard, W&B. Each implements `Sink`.

The JSONL file is the record of the run: one object per line, written and flushed before `write` returns, so that a
killed run keeps every step that it finished. The others are views.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slime.core.errors import ConfigError
from slime.observability.progress import duration

AXES = {"rollout": "rollout/step", "train": "train/step", "eval": "eval/step", "perf": "rollout/step"}
"""What a kind of step is counted by. Evaluations carry the rollout that they follow (-1: none yet)."""
KINDS = tuple(AXES)

EVAL_DETAIL = re.compile(r"-(truncated_ratio|num_prompts|num_unscored|pass@\d+)$")
EVAL_FACTS = ("eval/step", "eval/weight_version")
"""What `eval/<dataset>...` metrics hold beside the score of the dataset."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One logged step."""

    kind: str
    """One of `KINDS`."""
    step: int
    """The value on the axis of the kind."""
    metrics: Mapping[str, float]
    """Plain numbers by their full name."""
    time_s: float = field(default_factory=time.time)
    """Unix time."""

    @property
    def axis(self) -> str:
        return AXES[self.kind]


class Sink(Protocol):
    """Takes logged steps."""

    essential: bool
    """True: a failure of this sink ends the run. False: it is reported once and the sink is dropped."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends `{"time": ..., "<axis>": n, name: value, ...}` to a file, flushed per line."""

    essential = True

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, record: StepRecord) -> None:
        row: dict[str, Any] = {"time": round(record.time_s, 3), record.axis: record.step}
        # JSON has no NaN and no infinity; as text they survive every reader, and float() reads them back.
        row.update({k: v if math.isfinite(v) else str(v) for k, v in record.metrics.items()})
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file, non-finite values restored; a last line that a kill truncated is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append({k: float(v) for k, v in json.loads(line).items()})
        except json.JSONDecodeError:
            break
    return rows


def eval_name(key: str) -> str | None:
    """The dataset whose score `key` holds (`eval/<dataset>`); None for any other metric."""
    if not key.startswith("eval/") or key.count("/") != 1 or key in EVAL_FACTS or EVAL_DETAIL.search(key):
        return None
    return key.removeprefix("eval/")


class TensorBoardSink:
    """Scalars for TensorBoard, written without torch."""

    essential = False

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(f"got --use-tensorboard, but {error}; do: pip install tensorboard") from error
        self._writer = EventFileWriter(str(directory))

    def write(self, record: StepRecord) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.metrics.items()]
        self._writer.add_event(Event(wall_time=record.time_s, step=record.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; each kind of step has its own axis, as `<kind>/step`."""

    essential = False

    def __init__(self, *, settings: Mapping[str, Any], **init: Any) -> None:
        """`init`: arguments of `wandb.init` (project, group, name, dir, mode). `settings`: kept as the run's config."""
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ConfigError(f"got --use-wandb, but {error}; do: pip install 'slime[wandb]'") from error
        self._run: Any = wandb.init(config=dict(settings), **init)
        for kind, axis in AXES.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{kind}/*", step_metric=axis)

    def write(self, record: StepRecord) -> None:
        self._run.log({record.axis: record.step, **record.metrics})

    def close(self) -> None:
        self._run.finish()


HEADLINES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "rollout": (
        ("rollout/raw_reward", "reward", ".3f"),
        ("rollout/response_len/mean", "length", ".1f"),
        ("rollout/truncated_ratio", "truncated", ".0%"),
    ),
    "train": (
        ("train/loss", "loss", ".4f"),
        ("train/grad_norm", "grad", ".3g"),
        ("train/pg_clipfrac", "clip", ".1%"),
        ("train/kl_loss", "kl", ".3g"),
        ("train/train_rollout_logprob_abs_diff_max", "mismatch", ".1e"),
    ),
    "perf": (
        ("perf/step_time", "step", ".1fs"),
        ("perf/rollout_time", "rollout", ".1fs"),
        ("perf/train_time", "train", ".1fs"),
        ("perf/update_weights_time", "sync", ".2fs"),
        ("perf/eval_time", "eval", ".1fs"),
    ),
    "eval": (),
}
"""(metric, label, format) of what the console shows of each kind of step, in order; absent ones are left out."""


class ConsoleSink:
    """One line per step, the few numbers that tell whether the run is well, and how long it will still take."""

    essential = False

    def __init__(self, *, num_rollout: int | None = None, console: Any = None) -> None:
        """`num_rollout`: rollouts of the whole run, for the ETA."""
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._num_rollout = num_rollout
        self._num_done = 0
        self._start_s = time.time()

    def write(self, record: StepRecord) -> None:
        self._console.print(self.line(record), soft_wrap=True, markup=False, style=self._style(record))

    def line(self, record: StepRecord) -> str:
        """What `write` prints; called once per record."""
        head = f"{record.kind:>7} {record.step + 1}"  # people count from one; an evaluation: after so many rollouts
        if record.kind in ("rollout", "train") and self._num_rollout is not None:
            head = f"{record.kind:>7} {record.step + 1}/{self._num_rollout}"
        shown = [f"{label} {_number(record.metrics[key], spec)}" for key, label, spec in self._headlines(record)]
        line = "  ".join([f"{head:<13}", *shown])
        return line + self._eta(record) if record.kind == "perf" else line

    def _headlines(self, record: StepRecord) -> list[tuple[str, str, str]]:
        if record.kind != "eval":
            return [h for h in HEADLINES[record.kind] if h[0] in record.metrics]
        return [(key, name, ".3f") for key in record.metrics if (name := eval_name(key)) is not None]

    def _eta(self, record: StepRecord) -> str:
        self._num_done += 1  # of this process: a resumed run does not count what an earlier one did
        if self._num_rollout is None or record.step + 1 >= self._num_rollout:
            return ""
        left_s = (record.time_s - self._start_s) / self._num_done * (self._num_rollout - record.step - 1)
        return f"  left {duration(left_s)}"

    @staticmethod
    def _style(record: StepRecord) -> str:
        if not all(math.isfinite(v) for v in record.metrics.values()):
            return "bold red"
        return {"eval": "bold green", "rollout": "cyan", "perf": "dim"}.get(record.kind, "")

    def close(self) -> None:
        """Nothing is held."""


def _number(value: float, spec: str) -> str:
    """Formats by `spec`; a trailing `s` there is the unit of seconds."""
    return f"{value:{spec[:-1]}} s" if spec.endswith("s") else f"{value:{spec}}"
