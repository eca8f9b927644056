"""The graders: one class for each `--rm-type`.

    @GRADERS.register("my_grader")
    class MyGrader(Grader):
        "What it wants and what it returns."
        def grade(self, sample, limit_s): ...

Built-in graders are in the modules of this package; a user's own is named by its import path (`--rm-type
my_pkg.my_grader`). The fields of a grader that is a dataclass are settings of the same names; it sees nothing else of
the run. Graders run in processes of their own (`slime.rewards.grader_worker`), which import their libraries, so modules
here import them inside methods.

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
"""Limit of graders that only compute a formula: they need milliseconds, or they hang."""

Reward = float | dict[str, Any]
"""A finite number, or several by name, of which `--reward-key` picks one."""

NOT_OF_THE_ANSWER = (OSError, ImportError, SlimeError)
"""Exceptions of computing graders that blame the machine, the installation or the row, not the answer."""

BOXED_PREFIX = "boxed_"


class Grader(ABC):
    """Judges finished samples, in a process that can be killed."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """`grade` is async and mostly waits: one process runs many at a time, with the network."""
    is_slow: ClassVar[bool] = False
    """It computes longer than a formula takes and may use the whole `limit_s`."""
    needs_network: ClassVar[bool] = False
    """Its process keeps the network, as all that `waits` do; others lose it, where the kernel permits."""
    held: ClassVar[bool] = False
    """It computes from the sample alone, with libraries: its process gives up everything else (`slime.rewards.held`)
    and runs no program in an answer."""
    runs_code: ClassVar[bool] = False
    """It runs a model's code in the `sandbox`; machines that cannot confine that are refused before the start."""
    finds_box: ClassVar[bool] = False
    """It needs the text around the box, so with the prefix `boxed_` it would only fail."""
    needs_label: ClassVar[bool] = False
    """Without a label it cannot score."""
    score_keys: ClassVar[tuple[str, ...]] = ()
    """What `--reward-key` may pick, if it returns several numbers."""
    wrong: ClassVar[Reward | None] = None
    """The reward of a wrong answer, and of one that the grader cannot handle, if it computes from the answer alone.
    None: a failure may be the fault of a service, so the sample stays unscored."""

    @abstractmethod
    def grade(self, sample: Sample, limit_s: float) -> Reward | Awaitable[Reward]:
        """The reward of one finished sample. `limit_s`: from `limit_of`.

        An exception leaves the sample unscored. In a grader with `wrong` it is the answer's fault, except those in
        `NOT_OF_THE_ANSWER`.
        """

    def prepare(self, sample: Sample) -> None:
        """Prepares without looking at the answer: reads the label, loads what the row's task needs.

        If it raises or takes too long, the sample stays unscored, whatever the answer.
        """
        return

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """Seconds before the pool gives up on this sample: of processor time for graders with `wrong`, else by the
        clock. `limit_s`: `--reward-timeout-s`.
        """
        return limit_s if self.waits or self.is_slow else min(limit_s, BUILT_IN_LIMIT_S)

    def warm_up(self) -> None:
        """Imports slow libraries before the first sample's time runs."""
        return

    def check(self, args: Args) -> str | None:
        """Why the settings cannot work with it, checked before the start; None if they can."""
        return None


class GraderRegistry(Registry[Grader]):
    def get(self, name: str) -> type[Grader]:
        """Raises `ConfigError` for an unknown grader, or one that cannot have the prefix."""
        base = name.removeprefix(BOXED_PREFIX)
        grader = super().get(base)
        if grader.finds_box and base != name:
            raise ConfigError(f"--rm-type {name!r} (or metadata rm_type): {base} finds the box itself; drop the prefix")
        return grader

    def get_registered(self, name: str) -> type[Grader]:
        """For names in the data, which may not choose code: an import path is refused."""
        if name.removeprefix(BOXED_PREFIX) not in self:
            raise ConfigError(
                f"metadata rm_type {name!r} is not a grader; a row may name {', '.join(self.names())}, or what "
                "--rm-type names"
            )
        return self.get(name)


GRADERS = GraderRegistry("grader", flag="--rm-type", package="slime.rewards.graders", contract=Grader)


def make_grader(rm_type: str, settings: Mapping[str, Any] | None = None) -> Grader:
    """The grader of a name, with the settings that are its fields. Raises `ConfigError`."""
    grader = GRADERS.get(rm_type)(**(settings or {}))
    return Boxed(grader) if rm_type.startswith(BOXED_PREFIX) else grader


class Boxed(Grader):
    """Shows a grader only the content of the last `\\boxed{}`."""

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
