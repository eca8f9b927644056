"""Instruction following: the row's verifiable instructions, checked strictly and loosely.

The row carries `metadata["instruction_id_list"]` (ids of `instructions.CHECKS`) and `metadata["kwargs"]`, one object of
arguments for each id, as IFEval's data do; arguments that are null are left out. Strict: the answer as it stands, after
the last `</think>`. Loose: or without its first line, its last line, both, and each of these without asterisks.

Returns a dict; train on it with `--reward-key score` (all followed, strictly), or one of the other keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.graders.answers import after_thinking
from slime.rewards.graders.instructions import CHECKS


def instructions(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(id, arguments) of each instruction. Raises `DataError` if there is none, or an unknown one."""
    ids = metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise DataError("got a row without metadata['instruction_id_list']; the ifbench grader needs one id or more")
    unknown = sorted({str(i) for i in ids if i not in CHECKS})
    if unknown:
        raise DataError(f"got unknown instructions {unknown}; known are {', '.join(CHECKS)}")
    kwargs = metadata.get("kwargs") or [{}] * len(ids)
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        raise DataError(f"got {len(ids)} instruction ids and kwargs {str(kwargs)!r:.100}; write one object for each id")
    return [(i, {k: v for k, v in (k or {}).items() if v is not None}) for i, k in zip(ids, kwargs, strict=True)]


def follows(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Whether one instruction is followed; an empty text follows none."""
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def variants(text: str) -> list[str]:
    """The text as the loose score may read it."""
    lines = text.split("\n")
    shortened = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return list(dict.fromkeys([*shortened, *(part.replace("*", "") for part in shortened)]))


@GRADERS.register("ifbench")
class InstructionFollowing(Grader):
    """All instructions of the row are followed."""

    score_keys = ("score", "loose", "strict_share", "loose_share")
    held = True
    wrong: ClassVar[Reward] = dict.fromkeys(score_keys, 0.0)

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` on instructions that are unknown, and on arguments that do not fit them."""
        for name, arguments in instructions(sample.metadata):
            try:
                follows("A text of some words.", name, arguments)
            except (TypeError, KeyError, ValueError, AttributeError) as problem:
                raise DataError(f"got arguments {arguments} for {name}, which do not fit it: {problem!r}") from problem

    def grade(self, sample: Sample, limit_s: float) -> dict[str, float]:
        """Returns `score` and `loose` (1.0 if all are followed, else 0.0), `strict_share` and `loose_share`.

        Raises as `prepare`.
        """
        self.prepare(sample)
        wanted = instructions(sample.metadata)
        answer = after_thinking(sample.response).strip()
        strict = [follows(answer, name, arguments) for name, arguments in wanted]
        loose = [any(follows(v, name, arguments) for v in variants(answer)) for name, arguments in wanted]
        return {
            "score": float(all(strict)),
            "loose": float(all(loose)),
            "strict_share": sum(strict) / len(strict),
            "loose_share": sum(loose) / len(loose),
        }
