"""How views show samples: two on the console now and then, a page of TensorBoard's text plugin, a table for W&B.

Pure functions over `ShownSample`; the sinks call them (`slime.observability.sinks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.core.text import one_line, visible
from slime.observability.samples import PICKS, ShownSample, number

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

CONSOLE_CHARS = 240
"""Characters of a prompt or a response on the console."""
COLUMNS = ("step", "picked", "reward", "label", "prompt", "response", "status", "response_length", "weight_version")
"""Of a table: fields of `ShownSample`."""


def is_due(step: int, interval: int | None) -> bool:
    """Whether the console shows samples of this step: every `interval`; without one after 1, 2, 4, 8, ... steps."""
    if interval == 0:
        return False
    if interval is None:
        return step >= 0 and (step + 1) & step == 0
    return step == 0 or (step + 1) % interval == 0


def console_lines(samples: Sequence[ShownSample]) -> list[str]:
    """Two lines for each of one best and one worst; for any one where nothing was scored."""
    shown = [next((s for s in samples if s.picked == picked), None) for picked in PICKS]
    best, worst, other = shown
    lines = []
    for sample in (s for s in ((best, worst) if best or worst else (other,)) if s is not None):
        facts = [sample.picked] + ([f"reward {number(sample.reward)}"] if sample.reward is not None else [])
        facts += [f"label {one_line(sample.label, 60)}"] if sample.label is not None else []
        lines.append(f"{' '.join(facts)} | {one_line(sample.prompt, CONSOLE_CHARS)}")
        lines.append(f"  -> {one_line(sample.response, CONSOLE_CHARS)}")
    return lines


def by_tag(samples: Sequence[ShownSample]) -> dict[str, list[ShownSample]]:
    """`samples/rollout` and `samples/eval/<dataset>` -> the samples of it."""
    tags: dict[str, list[ShownSample]] = {}
    for sample in samples:
        tag = f"samples/{sample.kind}" + (f"/{sample.dataset}" if sample.dataset else "")
        tags.setdefault(tag, []).append(sample)
    return tags


def table(samples: Sequence[ShownSample]) -> list[list[Any]]:
    """One row for each sample, by `COLUMNS`."""
    return [[getattr(sample, name) for name in COLUMNS] for sample in samples]


def tensorboard_summary(samples: Sequence[ShownSample]) -> Summary:
    """A page of text for each tag; the text plugin renders Markdown."""
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
    """Markdown: prompt and response as indented code, in which nothing is markup."""
    parts = []
    for sample in samples:
        facts: Mapping[str, Any] = {"reward": number(sample.reward), "status": sample.status, "label": sample.label}
        said = ", ".join(f"{name} {one_line(str(fact), 80)}" for name, fact in facts.items() if fact is not None)
        parts.append(f"**{sample.picked}**\n\n" + _code(said) + "\n\n" + _code(sample.prompt))
        parts.append("answered\n\n" + _code(sample.response))
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return "\n".join("    " + line for line in visible(text).split("\n"))
