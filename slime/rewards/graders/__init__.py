"""The graders: one class for each `--rm-type`, one module for each class.

    @GRADERS.register("my_grader")
    class MyGrader(Grader):
        "What it wants and what it returns."
        def grade(self, sample, limit_s): ...

Built-in ones are the modules of this package; a user's own is named by its import path (`--rm-type my_pkg.my_grader`).
The fields of a grader that is a dataclass are settings of those names; of the rest of the run it sees nothing. Graders
run in processes of their own (`slime.rewards.grader_worker`), which import their libraries: here that happens inside
methods.

A name with the prefix `boxed_` grades the content of the last `\\boxed{}` alone.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slime.core.errors import ConfigError, SlimeError
from slime.core.registry import Registry
from slime.core.sample import Sample

if TYPE_CHECKING:
    from slime.settings import Args

BUILT_IN_LIMIT_S = 10.0
"""Longest grading by one that only computes a formula: it needs milliseconds, or it hangs."""

Reward = float | dict[str, Any]
"""A finite number, or several by name, of which `--reward-key` picks one."""

NOT_OF_THE_ANSWER = (OSError, ImportError, SlimeError)
"""What a grader that only computes raises when the machine, the installation or the row is to blame."""

BOXED_PREFIX = "boxed_"


class Grader(ABC):
    """Judges finished samples, in a process that can be killed."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """`grade` is async and waits more than it computes: one process runs many at a time, with the network."""
    is_slow: ClassVar[bool] = False
    """It computes for longer than a formula takes, within limits of its own: it may take the whole `limit_s`."""
    needs_network: ClassVar[bool] = False
    """Its process keeps the network. One that `waits` has it anyway; any other has none, where the kernel permits."""
    held: ClassVar[bool] = False
    """It computes from the sample alone, with libraries: its process gives up all else (`slime.rewards.held`), and may
    run no program that stands in an answer."""
    runs_code: ClassVar[bool] = False
    """It runs what a model wrote, in the `sandbox`: a machine that cannot hold that is refused before the start."""
    finds_box: ClassVar[bool] = False
    """It needs what stands around the box: with the prefix `boxed_` it would score nothing but failures."""
    needs_label: ClassVar[bool] = False
    """Without a label it can score nothing."""
    score_keys: ClassVar[tuple[str, ...]] = ()
    """What `--reward-key` may pick of a grader that returns several numbers."""
    wrong: ClassVar[Reward | None] = None
    """The reward of a wrong answer. A grader that computes it from the answer alone says it, and an answer that such a
    grader cannot deal with has it. None: when it fails, that may be the fault of a service, so the sample is unscored.
    """

    @abstractmethod
    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        """The reward of one finished sample.

        An exception leaves the sample unscored. In a grader that says what `wrong` is, it is the answer's doing, but
        for those in `NOT_OF_THE_ANSWER`. `limit_s`: by `limit_of`.
        """

    def prepare(self, sample: Sample) -> None:
        """What there is to do before anyone looks at the answer: reads the label, loads what the row's task needs.

        What it raises, and what it takes too long for, leaves the sample unscored, whatever the answer.
        """
        return

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """Seconds after which the pool gives up on this sample: of processor time if the grader says what `wrong` is,
        else by the clock. `limit_s`: `--reward-timeout-s`.
        """
        return limit_s if self.waits or self.is_slow else min(limit_s, BUILT_IN_LIMIT_S)

    def warm_up(self) -> None:
        """Imports what takes long, before the first sample comes and its time runs."""
        return

    def check(self, args: Args) -> str | None:
        """What of the settings cannot work with it (got / because / do); None if nothing. Asked before the start."""
        return None


class GraderRegistry(Registry[Grader]):
    """The graders by name, with or without the prefix."""

    def get(self, name: str) -> type[Grader]:
        """The grader that `--rm-type` names. Raises `ConfigError` if there is none, or it cannot have the prefix."""
        base = name.removeprefix(BOXED_PREFIX)
        grader = super().get(base)
        if grader.finds_box and base != name:
            raise ConfigError(
                f"got --rm-type {name!r} (or metadata rm_type), but {base} finds the box itself; drop the prefix"
            )
        return grader

    def get_registered(self, name: str) -> type[Grader]:
        """The same for a name that stands in the data, which choose no code: an import path is refused."""
        if name.removeprefix(BOXED_PREFIX) not in self:
            raise ConfigError(
                f"got metadata rm_type {name!r}, which names no grader; a row may name {', '.join(self.names())} or "
                "what --rm-type names"
            )
        return self.get(name)


GRADERS = GraderRegistry("grader", flag="--rm-type", package="slime.rewards.graders", contract=Grader)


def make_grader(rm_type: str, settings: Mapping[str, Any] | None = None) -> Grader:
    """The grader of a name, with the settings that are its fields. Raises `ConfigError`."""
    grader = GRADERS.get(rm_type)(**(settings or {}))
    return Boxed(grader) if rm_type.startswith(BOXED_PREFIX) else grader


class Boxed(Grader):
    """Shows another grader the content of the last `\\boxed{}` alone."""

    def __init__(self, inner: Grader) -> None:
        self._inner = inner

    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        """As the other one."""
        from slime.rewards.graders.answers import last_boxed

        boxed = dataclasses.replace(sample, response=last_boxed(sample.response) or "")
        return self._inner.grade(boxed, limit_s)

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """As the other one."""
        return self._inner.limit_of(sample, limit_s)

    def prepare(self, sample: Sample) -> None:
        """As the other one."""
        self._inner.prepare(sample)

    def warm_up(self) -> None:
        """As the other one."""
        self._inner.warm_up()
