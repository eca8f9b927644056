"""Sinks for logged steps: console, JSONL, TensorBoard, W&B.

The JSONL file is the authoritative record: one object per line, flushed before `write` returns, so a killed run does
not lose any logged step. The other sinks are views.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from slime.core.errors import ConfigError, DataError, DeadlineExceeded
from slime.core.files import full_disk_named
from slime.core.text import ends_whole, evaluation_name, step_name
from slime.observability.logs import FILE_ONLY
from slime.observability.progress import duration
from slime.observability.samples import (
    COLUMNS,
    Kind,
    ShownSample,
    by_tag,
    console_lines,
    is_due,
    table,
    tensorboard_summary,
)

logger = logging.getLogger("slime.steps")

AXES = {"rollout": "rollout/step", "train": "train/step", "eval": "eval/step", "perf": "rollout/step"}
"""Kind of step -> its axis. An evaluation has the number of the step before it (-1: none)."""
KINDS = tuple(AXES)
OTHER_AXES = {"data": "train/step", "startup": "rollout/step", "probe": "rollout/step"}
"""Axes of other metric prefixes that are logged with these kinds."""

HELD_OUT_LOSS = re.compile(r"eval/(.+)-loss")
EVAL_DETAIL = re.compile(r"-(truncated_ratio|num_\w+|loss|pass@\d+)$")
EVAL_COUNT = re.compile(r"eval/num_(prompts|samples|groups|scored|ungradable|unscored|unusable|failed)\w*")
"""Counts that a user's evaluation function logs without a dataset name."""
EVAL_FACTS = ("eval/step", "eval/weight_version")
"""`eval/` metrics that are not dataset scores."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    kind: str
    """One of `KINDS`."""
    step: int
    """Position on the axis of this kind."""
    metrics: Mapping[str, float]
    """Full metric name -> value."""
    time_s: float = field(default_factory=time.time)
    """Unix time."""

    @property
    def axis(self) -> str:
        return AXES[self.kind]


class Sink(Protocol):
    essential: bool
    """Whether a failure of this sink fails the run. If not, the failure is logged once and the sink is disabled."""

    def write(self, record: StepRecord) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """Closes the sink. `failed`: whether the run failed."""


@runtime_checkable
class SampleView(Protocol):
    """A sink that also shows samples."""

    def write_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None: ...


class JsonlSink:
    """Appends `{"time": ..., "<axis>": n, name: value, ...}` to a file and flushes each line.

    When opening the file, terminates an incomplete line left by a killed run, so that the next row starts a new line.
    """

    essential = True

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._folder = path.open("a"), path.parent
        if not ends_whole(path):
            self._file.write("\n")

    def write(self, record: StepRecord) -> None:
        row: dict[str, Any] = {"time": round(record.time_s, 3), record.axis: record.step}
        # JSON has no NaN or infinity. They are written as strings, which every JSON parser accepts and float() parses.
        row.update({k: v if math.isfinite(v) else str(v) for k, v in record.metrics.items()})
        with full_disk_named(self._folder):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a metrics file. Skips incomplete lines. Raises `DataError` for other invalid lines."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = {k: float(v) for k, v in json.loads(line).items()}
        except json.JSONDecodeError:
            continue
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} has no metrics; remove the line") from error
        if not all(math.isfinite(row.get(axis, 0.0)) for axis in AXES.values()):
            raise DataError(f"the step in line {number} of {path} is not a number; remove the line")
        rows.append(row)
    return rows


def eval_name(key: str) -> str | None:
    """Returns the dataset of a score `eval/<dataset>`, or None for any other metric."""
    if (
        not key.startswith("eval/")
        or key.count("/") != 1
        or key in EVAL_FACTS
        or EVAL_DETAIL.search(key)
        or EVAL_COUNT.fullmatch(key)
    ):
        return None
    return key.removeprefix("eval/")


class TensorBoardSink:
    """Writes TensorBoard event files without importing torch."""

    essential = False

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(f"--use-tensorboard needs tensorboard ({error}): pip install tensorboard") from error
        self._writer = EventFileWriter(str(directory))

    def write(self, record: StepRecord) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.metrics.items()]
        self._writer.add_event(Event(wall_time=record.time_s, step=record.step, summary=Summary(value=values)))
        self._writer.flush()

    def write_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        summary = tensorboard_summary(samples)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


WANDB_LIMIT_S = 300.0
"""Timeout for W&B's servers at the end of a run."""


class WandbSink:
    """Logs to Weights & Biases. Each kind of step has its own axis, `<kind>/step`.

    The package sends everything to its process `wandb-core`, which must stay alive until `close` returns.
    """

    essential = False

    def __init__(self, *, settings: Mapping[str, Any], **init: Any) -> None:
        """`init`: arguments of `wandb.init` (project, group, name, dir, mode). `settings`: the run's config in W&B."""
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ConfigError(f"--use-wandb needs wandb ({error}): pip install 'slime[wandb]'") from error
        self._table: Any = wandb.Table
        hook = sys.excepthook
        try:
            self._run: Any = wandb.init(config=dict(settings), **init)
        except wandb.Error as error:
            raise ConfigError(
                f"W&B refused --use-wandb: {error}; run wandb login, set --wandb-mode offline, or drop --use-wandb"
            ) from error
        sys.excepthook = hook  # W&B's hook would print tracebacks a second time; `close` reports failures
        for prefix, axis in (AXES | OTHER_AXES).items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{prefix}/*", step_metric=axis)

    def write(self, record: StepRecord) -> None:
        self._run.log({record.axis: record.step, **record.metrics})

    def write_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None:
        columns = list(COLUMNS)
        tables = {
            tag: self._table(columns=columns, data=table(of_tag), allow_mixed_types=True)
            for tag, of_tag in by_tag(samples).items()
        }
        self._run.log({AXES[kind]: step, **tables})

    def close(self, *, failed: bool = False) -> None:
        """Finishes the W&B run and stops `wandb-core`. Raises `DeadlineExceeded` after `WANDB_LIMIT_S`."""
        import wandb

        def end() -> None:
            self._run.finish(exit_code=int(failed))
            wandb.teardown(exit_code=int(failed))

        thread = threading.Thread(target=end, name="wandb finish", daemon=True)
        thread.start()
        thread.join(WANDB_LIMIT_S)
        if thread.is_alive():
            raise DeadlineExceeded.waiting(
                owner="driver", for_what="W&B to receive the last steps (run wandb sync)", limit_s=WANDB_LIMIT_S
            )


LOSS_ROUNDING = 1e-6
"""A smaller policy loss is only rounding error: with normalised advantages, it is zero before the first update."""
HEADLINES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "rollout": (
        ("rollout/raw_reward", "reward", ".3f"),
        ("rollout/response_len/mean", "mean length", ".1f tokens"),
        ("rollout/truncated_ratio", "truncated", ".0% of samples"),
    ),
    "train": (
        ("train/loss", "loss", ".4f"),
        ("train/entropy_loss", "entropy", ".3g"),
        ("train/grad_norm", "grad norm", ".3g"),
        ("train/pg_clipfrac", "clipped", ".1% of tokens"),
        ("train/kl_loss", "kl", ".3g"),
        ("train/train_rollout_logprob_abs_diff_max", "largest mismatch", ".1e nats"),
    ),
    "perf": (
        ("perf/step_time", "took", ".1f s"),
        ("perf/rollout_wait_time", "wait for batch", ".1f s"),
        ("perf/train_time", "train", ".1f s"),
        ("perf/update_weights_time", "weight sync", ".2f s"),
        ("perf/save_model_time", "save", ".1f s"),
        ("perf/eval_time", "evaluation", ".1f s"),
        ("probe/train_rollout_logprob_abs_diff_max", "largest mismatch of the probe", ".1e nats"),
    ),
    "eval": (),
}
"""(metric, label, format and unit) on the console for each kind of step, in order. Missing metrics are skipped."""
FINE_TUNING = (
    ("rollout/total_len/mean", "mean length", ".1f tokens"),
    ("rollout/trained_tokens", "trained tokens", ",.0f"),
    ("rollout/num_dropped_rows", "dropped rows", ",.0f"),
)
"""Replaces the "rollout" headlines for fine-tuning, where nothing is sampled or rewarded."""


FAILED_EVALUATIONS = ("eval/num_failed_evaluations", "failed evaluations so far", ".0f")
"""What the console shows of an evaluation that failed."""


class ConsoleSink:
    """Prints one line per step with the most important metrics and the ETA."""

    essential = False

    def __init__(
        self,
        *,
        num_rollout: int | None = None,
        console: Any = None,
        samples_interval: int | None = None,
        eval_interval: int | None = None,
    ) -> None:
        """`num_rollout`: total number of steps. `eval_interval`: steps between evaluations, for the ETA.
        `samples_interval`: see `is_due`.
        """
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._num_rollout, self._samples_interval = num_rollout, samples_interval
        self._eval_interval = eval_interval
        self._num_done, self._done_s, self._evaluation_s = 0, 0.0, 0.0

    def write(self, record: StepRecord) -> None:
        if "perf/eval_time" in record.metrics:
            self._evaluation_s = record.metrics["perf/eval_time"]
        line = self.line(record)
        self._print(line, self._style(record))
        logger.info("%s", line, extra=FILE_ONLY)

    def write_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None:
        """Prints samples of a step if they are due, and of an evaluation only if the run has no steps."""
        only_evaluates = self._num_rollout == 0 and self._samples_interval != 0
        if only_evaluates if kind == "eval" else is_due(step, self._samples_interval):
            for line in console_lines(samples):
                self._print(f"{'sample':>7}  {line}", "dim")

    def _print(self, line: str, style: str) -> None:
        """Prints plain text, so that rich does not interpret brackets as markup or `:smile:` as an emoji."""
        self._console.print(line, soft_wrap=True, markup=False, emoji=False, style=style)

    def line(self, record: StepRecord) -> str:
        """Returns the console line for a record. Must be called once per record, because it counts steps."""
        step, end = record.step, self._num_rollout
        kind = "data" if "rollout/trained_tokens" in record.metrics else record.kind
        head = f"{kind:>7}  {evaluation_name(step, end) if kind == 'eval' else step_name(step, end)}"
        shown = [f"{label} {_number(record.metrics[key], spec)}" for key, label, spec in self._headlines(record)]
        line = "  ".join([f"{head:<24}", *shown])
        return line + self._eta(record) if record.kind == "perf" else line

    def _headlines(self, record: StepRecord) -> list[tuple[str, str, str]]:
        if record.kind != "eval":
            shown = FINE_TUNING if "rollout/trained_tokens" in record.metrics else HEADLINES[record.kind]
            is_rounding = (
                "train/pg_loss" in record.metrics and abs(record.metrics.get("train/loss", 0.0)) < LOSS_ROUNDING
            )
            return [h for h in shown if h[0] in record.metrics and not (is_rounding and h[0] == "train/loss")]
        matches = {key: HELD_OUT_LOSS.fullmatch(key) for key in record.metrics}
        losses = [(key, f"{match[1]} loss", ".4f") for key, match in matches.items() if match]
        named = ((key, eval_name(key)) for key, match in matches.items() if not match)
        names = [match[1] for match in matches.values() if match]
        unusable = ((f"eval/{name}-num_unusable", f"{name} dropped rows", ".0f") for name in names)
        dropped = [one for one in unusable if record.metrics.get(one[0])]
        found = [*((key, name, ".3f") for key, name in named if name is not None), *losses, *dropped]
        return found or [one for one in [FAILED_EVALUATIONS] if one[0] in record.metrics]

    def _eta(self, record: StepRecord) -> str:
        """Returns the remaining time, estimated from the steps of this process, excluding startup and earlier
        launches. Evaluations that are still due count separately, each as long as the latest one.
        """
        evaluation_s = record.metrics.get("perf/eval_time", 0.0)
        self._num_done += 1
        self._done_s += record.metrics.get("perf/step_time", 0.0) - evaluation_s
        if self._num_rollout is None or record.step + 1 >= self._num_rollout or self._done_s <= 0:
            return ""
        ahead = range(record.step + 1, self._num_rollout)
        every = self._eval_interval
        num_evals = sum((step + 1) % every == 0 or step + 1 == self._num_rollout for step in ahead) if every else 0
        left_s = self._done_s / self._num_done * len(ahead) + self._evaluation_s * num_evals
        return f"  about {duration(left_s)} left" + (" (from one step)" if self._num_done == 1 else "")

    @staticmethod
    def _style(record: StepRecord) -> str:
        if not all(math.isfinite(v) for v in record.metrics.values()):
            return "bold red"
        return {"eval": "bold green", "rollout": "cyan", "perf": "dim"}.get(record.kind, "")

    def close(self, *, failed: bool = False) -> None:
        pass


def _number(value: float, spec: str) -> str:
    """Formats a number with `spec`, which may end in a unit. Shows 0 or 100 % only if exact, and never -0."""
    form, space, unit = spec.partition(" ")
    shown = f"{value or 0.0:{form}}"
    if form.endswith("%"):
        least = 10.0 ** -(int(form[1]) + 2)
        if 0 < value < least / 2:
            shown = f"<{least:{form}}"
        elif 1 - least / 2 < value < 1:
            shown = f">{1 - least:{form}}"
    elif value and math.isfinite(value) and not re.search("[1-9]", shown):
        shown = f"{value:.1e}"
    return f"{shown}{space}{unit}"
