"""The graders: one class for each `--rm-type`.

    @GRADERS.register("my_grader")
    class MyGrader(Grader):
        "What it expects and what it returns."
        def grade(self, sample, limit_s): ...

Built-in graders are in the modules of this package. A user's grader is selected by its import path (`--rm-type
my_pkg.my_grader`). If a grader is a dataclass, its fields are settings with the same names. It gets no other settings
of the run. Graders run in separate processes (`slime.rewards.grader_worker`), so modules here import libraries only
inside methods.

With the prefix `boxed_` a grader sees only the content of the last `\\boxed{}`.
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
"""Time limit of graders that only compute a formula, which takes milliseconds unless they hang."""

Reward = float | dict[str, Any]
"""A finite number, or a dict of numbers from which `--reward-key` picks one."""

NOT_OF_THE_ANSWER = (OSError, ImportError, SlimeError)
"""Exceptions of a computing grader that the machine, the installation or the row causes, not the answer."""

BOXED_PREFIX = "boxed_"


class Grader(ABC):
    """Judges finished samples, in a process that can be killed."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether `grade` is async and mostly waits. Many such gradings share one process, which has the network."""
    is_slow: ClassVar[bool] = False
    """Whether the grader computes more than a formula and may use the whole `limit_s`."""
    needs_network: ClassVar[bool] = False
    """Whether its process keeps the network. A grader with `waits` always keeps it; any other loses the network if
    the kernel permits."""
    held: ClassVar[bool] = False
    """Whether the grader needs only the sample and libraries. Its process then gives up everything else
    (`slime.rewards.grader_confinement`) and never runs an answer as a program."""
    runs_code: ClassVar[bool] = False
    """Whether the grader runs a model's code in the sandbox (`program_sandbox`). Machines that cannot confine code are
    refused at start."""
    finds_box: ClassVar[bool] = False
    """Whether the grader needs the text around the box, so that the prefix `boxed_` makes no sense."""
    needs_label: ClassVar[bool] = False
    """Whether the grader cannot score without a label."""
    score_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that `--reward-key` may pick, if the grader returns several numbers."""
    wrong: ClassVar[Reward | None] = None
    """For graders that only compute: the reward of a wrong answer, and of an answer that the grader cannot handle.
    None: a service may be the cause of a failure, so the sample stays unscored."""

    @abstractmethod
    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        """Returns the reward of one finished sample. `limit_s`: the result of `limit_of`.

        An exception leaves the sample unscored. If the grader has `wrong`, the answer is blamed and gets that reward,
        except for exceptions in `NOT_OF_THE_ANSWER`.
        """

    def prepare(self, sample: Sample) -> None:
        """Reads the label and loads what the row's task needs, without looking at the answer.

        If this raises or takes too long, the sample stays unscored, whatever its answer.
        """
        return

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """Returns the time limit for this sample in seconds: processor time for graders with `wrong`, else wall-clock
        time. `limit_s`: `--reward-timeout-s`.
        """
        return limit_s if self.waits or self.is_slow else min(limit_s, BUILT_IN_LIMIT_S)

    def warm_up(self) -> None:
        """Imports slow libraries, so that their import does not count towards the first sample's limit."""
        return

    def check(self, args: Args) -> str | None:
        """Returns why the settings cannot work with this grader, checked before the start; None if they can."""
        return None


class GraderRegistry(Registry[Grader]):
    def get(self, name: str) -> type[Grader]:
        """Returns the grader class. Raises `ConfigError` for an unknown name, or a wrong prefix `boxed_`."""
        base = name.removeprefix(BOXED_PREFIX)
        grader = super().get(base)
        if grader.finds_box and base != name:
            raise ConfigError(f"--rm-type {name!r} (or metadata rm_type): {base} finds the box itself; drop the prefix")
        return grader

    def get_registered(self, name: str) -> type[Grader]:
        """Returns the grader class for a name in the data. Refuses import paths, because data may not choose code."""
        if name.removeprefix(BOXED_PREFIX) not in self:
            raise ConfigError(
                f"metadata rm_type {name!r} is not a grader; use one of {', '.join(self.names())}, or the one "
                "that --rm-type names"
            )
        return self.get(name)


GRADERS = GraderRegistry("grader", flag="--rm-type", package="slime.rewards.graders", contract=Grader)


def make_grader(rm_type: str, settings: Mapping[str, Any] | None = None) -> Grader:
    """Returns an instance of the named grader, with `settings` as its fields. Raises `ConfigError`."""
    grader = GRADERS.get(rm_type)(**(settings or {}))
    return Boxed(grader) if rm_type.startswith(BOXED_PREFIX) else grader


class Boxed(Grader):
    """Wraps a grader so that it sees only the content of the last `\\boxed{}`."""

    def __init__(self, inner: Grader) -> None:
        self._inner = inner

    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        from slime.rewards.graders.answers import last_boxed

        boxed = dataclasses.replace(sample, response=last_boxed(sample.response) or "")
        return self._inner.grade(boxed, limit_s)

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        return self._inner.limit_of(sample, limit_s)

    def prepare(self, sample: Sample) -> None:
        self._inner.prepare(sample)

    def warm_up(self) -> None:
        self._inner.warm_up()
