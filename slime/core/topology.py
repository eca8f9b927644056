"""The topology of a fleet: which models are served, by how many engines of which width, for what each.

    model    policy, reference, teacher, ...      a checkpoint; one router in front of its engines
    group    engines of one kind and one width    with SGLang arguments of its own

The engines of a model either answer requests whole, or work in pairs: one reads the prompt and hands keys and values to
another one, which samples. Without `--sglang-config` it is one model, the policy, and one group, or one of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

DEFAULT_NAME = "default"
"""Of the only model of a run without `--sglang-config`."""


class Worker(str, Enum):
    """What an engine does of a request."""

    REGULAR = "regular"
    """All of it."""
    PREFILL = "prefill"
    """It reads prompts, and hands keys and values to a decoding engine."""
    DECODE = "decode"
    """It goes on from there."""
    ENCODER = "encoder"
    """It encodes images for the other engines of its model."""
    PLACEHOLDER = "placeholder"
    """Nothing runs: its GPUs are kept free."""


PAIRED = (Worker.PREFILL, Worker.DECODE)
"""Those that answer a request together."""
BOOTSTRAP_OFFSET = 1
"""A prefill engine has a second port, on which decode engines ask it for what it has read: so far behind its first."""


def bootstrap_of(url: str) -> tuple[str, int]:
    """Host and port on which the prefill engine at `url` is asked for what it has read."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port + BOOTSTRAP_OFFSET


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that are alike."""

    num_gpus: int
    """Of all of them together."""
    num_gpus_per_engine: int
    worker: Worker = Worker.REGULAR
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """ServerArgs by field name, over those of the run."""
    place: str = field(default="", compare=False)
    """Where it is said, for messages: in the file of `--sglang-config`; empty for the flags."""

    @property
    def runs(self) -> bool:
        """Whether servers are started for it; a placeholder has none."""
        return self.worker is not Worker.PLACEHOLDER


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, and the engines that serve it."""

    name: str
    path: str
    """A Hugging Face checkpoint folder."""
    groups: tuple[EngineGroup, ...]
    trained: bool = True
    """Whether it is the policy, whose engines get the weights of the trainer, if there is one; others serve what their
    checkpoint has."""

    @property
    def in_pairs(self) -> bool:
        """Whether its prompts are read by other engines than those that sample."""
        return any(group.worker in PAIRED for group in self.groups)


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """One engine before it has a place; a placeholder is one that never runs."""

    model: ServedModel
    group: EngineGroup

    @property
    def num_gpus(self) -> int:
        """Of it alone."""
        return self.group.num_gpus_per_engine

    @property
    def runs(self) -> bool:
        """Whether a server is started for it."""
        return self.group.runs


@dataclass(frozen=True, slots=True)
class Topology:
    """All models of a run."""

    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        """Of all engines and placeholders."""
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def policy(self) -> ServedModel | None:
        """The one that is trained; None if all are frozen."""
        return next((model for model in self.models if model.trained), None)

    @property
    def main(self) -> ServedModel | None:
        """The one that rollouts ask: the policy, else the first; None if nothing is served."""
        return self.policy or next(iter(self.models), None)

    def wanted(self) -> Iterator[WantedEngine]:
        """Every engine, in the order in which they get their places: as written."""
        for model in self.models:
            for group in model.groups:
                for _ in range(group.num_gpus // group.num_gpus_per_engine):
                    yield WantedEngine(model, group)
