"""A few human-readable samples of each step and evaluation, written to `samples.jsonl`.

The rollout side picks and decodes them (`slime.rollout.sample_metrics`), the driver writes them (`SamplesFile`), and
the console, TensorBoard, W&B, the report and `slime samples` show them. They are never re-tokenized or trained on.

Invariants
1. Each line is one sample, written before the loop continues.
2. The reader skips an incomplete line left by a killed run. A resumed run never appends to such a line.
3. Text from models, tools and datasets is untrusted, so `visible` escapes it before it reaches a terminal or a page.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from slime.core.files import full_disk_named
from slime.core.text import ends_whole, evaluation_name, one_line, step_name, visible

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

Kind = Literal["rollout", "eval"]
Picked = Literal["best", "worst", "random"]
PICKS: tuple[Picked, ...] = get_args(Picked)

DROPPED_ROWS = "dropped_rows.jsonl"
"""File in the run folder that lists the dropped rows of each dataset and the reasons."""
FILE_NAME = "samples.jsonl"
CELL_CHARS = 200
"""Maximum characters of a prompt or response in a table cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample as text for display. Long text is shortened in the middle."""

    kind: Kind
    step: int
    """Step number, from 0. For an evaluation, the step before it (-1: none)."""
    dataset: str | None = None
    """Name of the evaluation dataset."""
    prompt: str
    """Everything before the response, including special tokens."""
    response: str
    """The model's tokens and tool results, including special tokens. For SFT, starts at the first trained token."""
    reward: float | None
    """Reward before normalisation. None if no grader could score the sample."""
    label: str | None
    """The reference answer as text."""
    status: str
    """A value of `slime.core.sample.Status`."""
    response_length: int
    """Number of tokens after the prompt, including tool results."""
    weight_version: int | None
    """Newest weight version that sampled any of the tokens. None if no engine sampled them."""
    finish_reason: str | None
    """stop, length or abort. None if no engine sampled the tokens."""
    picked: Picked
    """Why the sample was picked."""
    group_index: int | None = None
    """Index of the prompt."""
    index: int | None = None
    """Index of the execution."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Additional values, if any: `weight_versions`, `num_turns`, `tool_calls`, `tool_errors`, `unscored`, `ungradable`,
    `scores` (the numbers in a dict reward), `trained_tokens`."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The sample's own metadata as JSON, from the data row and the user's functions. Not sent to TensorBoard or W&B."""

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShownSample:
        """Ignores unknown keys. Raises `TypeError` for missing keys."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


class SamplesFile:
    """Appends samples to a file, which is created by the first sample."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new_start = True

    def append(self, samples: Iterable[ShownSample]) -> None:
        """Writes one line per sample, all with the same `time` (Unix seconds)."""
        stamp = {"time": time.time()}
        rows = [{**stamp, **sample.to_dict()} for sample in map(_finite, samples)]
        if not rows:
            return
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
        # A lone surrogate cannot be encoded as UTF-8, but it can be escaped in JSON.
        content = ("\n".join(lines) + "\n").encode("utf-8", errors="backslashreplace")
        with full_disk_named(self._path.parent), self._path.open("ab") as file:
            if self._is_new_start and not ends_whole(self._path):
                content = b"\n" + content
            file.write(content)
        self._is_new_start = False


def _finite(sample: ShownSample) -> ShownSample:
    """Returns the sample with a non-finite reward replaced with None, because JSON cannot represent it."""
    reward = sample.reward
    return sample if reward is None or abs(reward) < float("inf") else dataclasses.replace(sample, reward=None)


def read_samples(path: Path) -> list[ShownSample]:
    """Returns the samples in `samples.jsonl` in file order, or an empty list if there is no file. If a resumed run
    repeated a step, only returns the later samples. Skips incomplete lines."""
    if not path.is_file():
        return []
    steps: dict[tuple[str, int, str | None], tuple[Any, list[ShownSample]]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            sample, stamp = ShownSample.from_dict(row), row.get("time")
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        key = (sample.kind, sample.step, sample.dataset)
        if key in steps and steps[key][0] != stamp:
            del steps[key]
        steps.setdefault(key, (stamp, []))[1].append(sample)
    return [sample for _, of_step in steps.values() for sample in of_step]


def heading(sample: ShownSample) -> str:
    """Describes a sample's origin and outcome in one line."""
    ended = f"{sample.response_length} tokens, {sample.status}"
    parts = [f"{where(sample)}, {when(sample)}, {sample.picked}"]
    parts += [ended] if is_from_data(sample) else [f"reward {number(sample.reward)}", ended]
    if sample.weight_version is not None:
        parts.append(f"weights {sample.weight_version}")
    return " | ".join(parts)


def where(sample: ShownSample) -> str:
    """Returns `rollout`, `training data` (fine-tuning), `eval`, or `eval DATASET`."""
    if is_from_data(sample):
        return "training data"
    return f"{sample.kind} {one_line(sample.dataset or '', 80)}".rstrip()


def is_from_data(sample: ShownSample) -> bool:
    """Returns whether the response comes from the data (fine-tuning): no engine sampled it, nothing scored it."""
    sampled = sample.weight_version is not None or sample.finish_reason is not None
    return sample.kind == "rollout" and not sampled and sample.reward is None and "unscored" not in sample.more


def when(sample: ShownSample) -> str:
    """Returns `step 3`, `after step 3` for an evaluation, or `before step 0`."""
    return (evaluation_name if sample.kind == "eval" else step_name)(sample.step)


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def samples_markdown(path: Path, limit: int = 8, *, fine_tuning: bool = False) -> str:
    """Returns a Markdown section with a table of at most `limit` samples, or "" without samples.

    Half of them are from the first step and evaluation, half from the last. Best and worst samples have priority over
    random ones. `fine_tuning`: responses come from the data.
    """
    samples = read_samples(path)
    if not samples:
        return ""
    names = (
        ("when", "prompt", "target")
        if fine_tuning
        else ("of", "when", "picked", "reward", "label", "prompt", "response")
    )
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    rows = [head, *(_markdown_row(sample, names) for sample in first_and_last(samples, limit))]
    return "## Samples\n\n" + "\n".join(rows) + f"\n\nAll {len(samples)} are in `{path.name}`.\n"


def first_and_last(samples: Sequence[ShownSample], limit: int) -> list[ShownSample]:
    """Selects up to `limit` samples in turn from the first and last steps of each dataset, best and worst first."""
    steps: dict[tuple[str, str | None], list[int]] = {}
    for s in samples:
        steps.setdefault((s.kind, s.dataset), []).append(s.step)
    ends = {(kind, dataset, end) for (kind, dataset), seen in steps.items() for end in (min(seen), max(seen))}
    queues = {key: sorted(_of(samples, key), key=lambda s: PICKS.index(s.picked)) for key in sorted(ends, key=str)}
    rounds = max(map(len, queues.values()), default=0)
    taken = [queue[i] for i in range(rounds) for queue in queues.values() if i < len(queue)][: max(limit, 0)]
    return sorted(taken, key=lambda s: (s.step, s.kind, s.dataset or "", PICKS.index(s.picked)))


def _of(samples: Sequence[ShownSample], key: tuple[str, str | None, int]) -> list[ShownSample]:
    return [s for s in samples if (s.kind, s.dataset, s.step) == key]


def _markdown_row(sample: ShownSample, names: Sequence[str]) -> str:
    cells = {
        "of": _code(where(sample)),
        "when": when(sample),
        "picked": sample.picked,
        "reward": number(sample.reward),
        "label": _code(sample.label or ""),
        "prompt": _code(sample.prompt),
        "response": _code(sample.response),
        "target": _code(sample.response),
    }
    return f"| {' | '.join(cells[name] for name in names)} |"


def _code(text: str) -> str:
    """Returns a Markdown code span. Escapes pipes, because they would end a table cell."""
    line = one_line(text, CELL_CHARS).strip().replace("|", "\\|")
    if not line:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


# --- formatting for the sinks: console, TensorBoard's text plugin, W&B tables

CONSOLE_CHARS = 240
"""Maximum characters of a prompt or response on the console."""
COLUMNS = ("step", "picked", "reward", "label", "prompt", "response", "status", "response_length", "weight_version")
"""Fields of `ShownSample` shown in tables."""


def is_due(step: int, interval: int | None) -> bool:
    """Returns whether the console shows samples of this step: every `interval` steps; by default 1, 2, 4, 8, ..."""
    if interval == 0:
        return False
    if interval is None:
        return step >= 0 and (step + 1) & step == 0
    return step == 0 or (step + 1) % interval == 0


def console_lines(samples: Sequence[ShownSample]) -> list[str]:
    """Returns two lines each for the best and the worst sample, or for a random one if none was scored."""
    shown = [next((s for s in samples if s.picked == picked), None) for picked in PICKS]
    best, worst, other = shown
    lines = []
    for sample in (s for s in ((best, worst) if best or worst else (other,)) if s is not None):
        facts = ["from the data" if is_from_data(sample) else sample.picked] + (
            [f"reward {number(sample.reward)}"] if sample.reward is not None else []
        )
        facts += [f"label {one_line(sample.label, 60)}"] if sample.label is not None else []
        lines.append(f"{' '.join(facts)} | {one_line(sample.prompt, CONSOLE_CHARS)}")
        lines.append(f"  -> {one_line(sample.response, CONSOLE_CHARS)}")
    return lines


def by_tag(samples: Sequence[ShownSample]) -> dict[str, list[ShownSample]]:
    """Groups samples by tag: `samples/rollout` or `samples/eval/<dataset>`."""
    tags: dict[str, list[ShownSample]] = {}
    for sample in samples:
        tag = f"samples/{sample.kind}" + (f"/{sample.dataset}" if sample.dataset else "")
        tags.setdefault(tag, []).append(sample)
    return tags


def table(samples: Sequence[ShownSample]) -> list[list[Any]]:
    return [[getattr(sample, name) for name in COLUMNS] for sample in samples]


def tensorboard_summary(samples: Sequence[ShownSample]) -> Summary:
    """Returns one page of Markdown per tag, for TensorBoard's text plugin."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    return Summary(
        value=[
            Summary.Value(
                tag=f"{tag}/text_summary",
                metadata=metadata.create_summary_metadata(display_name=tag, description=""),
                tensor=make_tensor_proto(page(of_tag).encode("utf-8", errors="backslashreplace")),
            )
            for tag, of_tag in by_tag(samples).items()
        ]
    )


def page(samples: Sequence[ShownSample]) -> str:
    """Returns Markdown with prompts and responses as indented code."""
    parts = []
    for sample in samples:
        facts: Mapping[str, Any] = {"reward": number(sample.reward), "status": sample.status, "label": sample.label}
        said = ", ".join(f"{name} {one_line(str(fact), 80)}" for name, fact in facts.items() if fact is not None)
        parts.append(f"**{sample.picked}**\n\n" + _as_code(said) + "\n\n" + _as_code(sample.prompt))
        parts.append("answered\n\n" + _as_code(sample.response))
    return "\n\n".join(parts)


def _as_code(text: str) -> str:
    return "\n".join("    " + line for line in visible(text).split("\n"))
