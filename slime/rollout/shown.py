"""Which samples people see: the best, the worst and some at random of each step and each evaluation dataset, as text.

Runs on the rollout side, where the tokenizer is. Ids are decoded here for people only: the text goes to
`samples.jsonl` and to the views, never back into a batch. What cannot be shown is logged and left out; it never ends
a run. `Showcase` keeps what was picked until the actor sends it beside the metrics.

Invariants
1. The same samples, seed and step give the same picks.
2. No sample is shown twice in one step.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import FINISH_REASONS, Sample
from slime.core.text import shorten, visible
from slime.observability.samples import Kind, Picked, ShownSample
from slime.rollout.turns import tool_counts
from slime.settings import Args

logger = logging.getLogger(__name__)

REASON_OF = {status: reason for reason, status in FINISH_REASONS.items()}
MAX_LABEL_CHARS, MAX_SCORES = 500, 20


def pick(rewards: Sequence[float | None], num: int, chance: random.Random) -> list[tuple[int, Picked]]:
    """Positions to show, at most `num`: the best, the worst, then any. Among equals chance decides.

    Without a reward to compare by (none, or of one sample) there is no best and no worst.
    """
    order = list(range(len(rewards)))
    chance.shuffle(order)
    scored = sorted((i for i in order if _comparable(rewards[i])), key=lambda i: -float(rewards[i] or 0.0))
    picked: list[tuple[int, Picked]] = []
    if len(scored) > 1:
        picked = [(scored[0], "best"), (scored[-1], "worst")]
    taken = {i for i, _ in picked}
    rest: list[tuple[int, Picked]] = [(i, "random") for i in order if i not in taken]
    return (picked + rest)[:num]


def _comparable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


class Showcase:
    """Picks and decodes; the step loop calls it once per step and once per evaluation."""

    def __init__(self, args: Args, tokenizer: Any) -> None:
        """`tokenizer`: the HF tokenizer; without one the samples' own text is shown."""
        self._args, self._tokenizer = args, tokenizer
        self._picked: dict[tuple[Kind, int], list[ShownSample]] = {}

    def take(self, kind: Kind, step: int) -> list[ShownSample]:
        """What was picked of a step or an evaluation; it is kept no longer."""
        return self._picked.pop((kind, step), [])

    def add_rollout(self, step: int, groups: Sequence[Sequence[Sample]]) -> None:
        """Picks from the groups of a batch."""
        samples = [sample for group in groups for sample in group]
        self._add("rollout", step, None, samples, self._args.reward_key)

    def add_evaluation(self, step: int, data: Mapping[str, Mapping[str, Any]]) -> None:
        """Picks from each dataset of an evaluation."""
        for name, entry in data.items():
            self._add("eval", step, name, list(entry.get("samples") or ()), self._args.eval_reward_key)

    def _add(
        self, kind: Kind, step: int, dataset: str | None, samples: Sequence[Sample], reward_key: str | None
    ) -> None:
        if not self._args.log_samples:
            return
        chance = random.Random(f"{self._args.rollout_seed} {kind} {step} {dataset}")
        try:
            rewards = [self._reward(sample, reward_key) for sample in samples]
            shown = [
                self._show(samples[i], rewards[i], kind=kind, step=step, dataset=dataset, picked=why)
                for i, why in pick(rewards, self._args.log_samples, chance)
            ]
        except Exception:  # a user's sample may hold anything; what people see never ends a run
            logger.exception("samples of %s %d cannot be shown", kind, step)
            return
        self._picked.setdefault((kind, step), []).extend(shown)

    def _reward(self, sample: Sample, reward_key: str | None) -> float | None:
        """None for a conversation that is learned as it is: nothing judged it."""
        if self._args.loss_type == "sft_loss" and not sample.weight_versions:
            return None
        try:
            return sample.get_reward_value(reward_key)
        except DataError:
            return None

    def _show(
        self, sample: Sample, reward: float | None, *, kind: Kind, step: int, dataset: str | None, picked: Picked
    ) -> ShownSample:
        start, limit = sample.prompt_length, self._args.log_samples_max_chars
        ids = sample.column("tokens")
        prompt_ids, response_ids = ([], []) if ids is None else (ids[:start].tolist(), ids[start:].tolist())
        prompt, response = self._text(prompt_ids, sample.prompt), self._text(response_ids, sample.response)
        versions = sample.weight_versions
        without = sample.label is None or (isinstance(sample.label, str) and not sample.label)
        label = None if without else shorten(visible(_as_text(sample.label)), MAX_LABEL_CHARS)
        return ShownSample(
            kind=kind,
            step=step,
            dataset=dataset,
            prompt=shorten(visible(prompt), limit),
            response=shorten(visible(response), limit),
            reward=reward,
            label=label,
            status=sample.status.value,
            response_length=sample.response_length,
            weight_version=max(versions, default=None),
            finish_reason=REASON_OF.get(sample.status) if versions else None,
            picked=picked,
            group_index=sample.group_index,
            index=sample.index,
            more=_more(sample),
        )

    def _text(self, ids: Sequence[int], text: Any) -> str:
        """The ids with their special tokens spelled out; without ids or tokenizer the text that the sample brings."""
        if ids and self._tokenizer is not None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return _as_text(text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _more(sample: Sample) -> dict[str, Any]:
    """Facts that only some samples have. Of the metadata only what slime itself knows: the rest may be private."""
    more: dict[str, Any] = {}
    if len(sample.weight_versions) > 1:
        more["weight_versions"] = sample.weight_versions
    trained = 0 if sample.remove_sample else sample.effective_response_length
    if trained != sample.response_length:
        more["trained_tokens"] = trained
    if isinstance(sample.reward, dict):
        numbers = {str(k): float(v) for k, v in sample.reward.items() if isinstance(v, int | float)}
        more["scores"] = {k: v for k, v in list(numbers.items())[:MAX_SCORES] if math.isfinite(v)}
    for name in ("unscored", "ungradable"):
        if reason := getattr(sample, name):
            more[name] = shorten(visible(reason), MAX_LABEL_CHARS)
    return more | tool_counts(sample)
