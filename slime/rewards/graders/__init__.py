"""The graders: one class for each `--rm-type`.

    @GRADERS.register("my_grader")
    class MyGrader(Grader):
        "What it expects and what it returns."
        def grade(self, sample, limit_s): ...

Built-in graders are in the modules of this package. A user's grader is selected by its import path (`--rm-type
my_pkg.my_grader`). If a grader is a dataclass, its fields become settings of the same name; it sees no other settings.
Graders run in separate processes (`slime.rewards.grader_worker`), so these modules import libraries only inside
methods.

With the prefix `boxed_`, a grader sees only the content of the last `\\boxed{}`.
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
"""Time limit for graders that only evaluate a formula, which takes milliseconds unless they hang."""

Reward = float | dict[str, Any]
"""A finite number, or a dict of numbers from which `--reward-key` picks one."""

NOT_OF_THE_ANSWER = (OSError, ImportError, SlimeError)
"""Exceptions in a compute-only grader that are due to the machine, the installation or the row, not the answer."""

BOXED_PREFIX = "boxed_"


class Grader(ABC):
    """Scores finished samples, in a process that can be killed."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether `grade` is async and mostly waits. Many such requests share one process, which has network access."""
    is_slow: ClassVar[bool] = False
    """Whether the grader does more than evaluate a formula and can use all of `limit_s`."""
    needs_network: ClassVar[bool] = False
    """Whether the process keeps network access. Graders with `waits` always keep it; all others lose it if the kernel
    permits."""
    held: ClassVar[bool] = False
    """Whether the grader needs only the sample and libraries. If so, its process gives up access to everything else
    (`slime.rewards.grader_confinement`) and never runs an answer as a program."""
    runs_code: ClassVar[bool] = False
    """Whether the grader runs a model's code in the sandbox (`program_sandbox`). If so, the run does not start on a
    machine that cannot confine code."""
    finds_box: ClassVar[bool] = False
    """Whether the grader finds the box itself and needs the text around it, so the prefix `boxed_` is an error."""
    needs_label: ClassVar[bool] = False
    """Whether the grader cannot score a sample without a label."""
    score_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that `--reward-key` can select, if the grader returns several numbers."""
    wrong: ClassVar[Reward | None] = None
    """For compute-only graders: the reward of a wrong answer, or of one that the grader cannot handle. None if failures
    can be the fault of a service; the sample then stays unscored."""

    @abstractmethod
    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        """Returns the reward of a finished sample. `limit_s` is the result of `limit_of`.

        If this raises, the sample stays unscored. If `wrong` is set, the answer gets that reward instead, except for
        exceptions in `NOT_OF_THE_ANSWER`.
        """

    def prepare(self, sample: Sample) -> None:
        """Parses the label and loads what the task needs, without looking at the answer.

        If this raises or times out, the sample stays unscored, whatever the answer.
        """
        return

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """Returns the time limit for a sample in seconds: CPU time for graders with `wrong`, else wall-clock time.
        `limit_s` is `--reward-timeout-s`.
        """
        return limit_s if self.waits or self.is_slow else min(limit_s, BUILT_IN_LIMIT_S)

    def warm_up(self) -> None:
        """Imports slow libraries, so that this does not count towards the time limit of the first sample."""
        return

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings do not work with this grader, else None. Called before the run."""
        return None


class GraderRegistry(Registry[Grader]):
    def get(self, name: str) -> type[Grader]:
        """Returns the grader class. Raises `ConfigError` for an unknown name or a misplaced prefix `boxed_`."""
        base = name.removeprefix(BOXED_PREFIX)
        grader = super().get(base)
        if grader.finds_box and base != name:
            raise ConfigError(f"--rm-type {name!r} (or metadata rm_type): {base} finds the box itself; drop the prefix")
        return grader

    def get_registered(self, name: str) -> type[Grader]:
        """Returns the grader class for a name in the data. Rejects import paths, because data must not select code."""
        if name.removeprefix(BOXED_PREFIX) not in self:
            raise ConfigError(
                f"metadata rm_type {name!r} is not a grader; use one of {', '.join(self.names())}, or the grader of "
                "--rm-type"
            )
        return self.get(name)


GRADERS = GraderRegistry("grader", flag="--rm-type", package="slime.rewards.graders", contract=Grader)


def make_grader(rm_type: str, settings: Mapping[str, Any] | None = None) -> Grader:
    """Creates the named grader, with `settings` as its fields. Raises `ConfigError`."""
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
