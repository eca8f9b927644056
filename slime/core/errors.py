"""The error tree, named after the boundary that was crossed.

Every message says three things: what was *got*, *because* of what that cannot work, and what to *do*.
Each class is also the matching standard exception, so that ordinary handlers work. All of them pickle.
"""

from __future__ import annotations

START_FLAG, SAVE_FLAG = "--engine-start-timeout-s", "--save-timeout-s"
"""They raise the limits of starting, and of saving and loading."""


class Terminated(SystemExit):
    """SIGTERM came, and everything unwinds as after Ctrl-C. Its code is 143."""


class SlimeError(Exception):
    """Root of every error that slime raises on purpose."""

    engines: tuple[str, ...] = ()
    """Addresses of the engines that failed, where a call to several of them failed at some."""


class ConfigError(SlimeError, ValueError):
    """The user asked for something unknown, contradictory or impossible. Raised before any process starts."""


class DataError(SlimeError, ValueError):
    """A dataset, a row or a sample does not satisfy its contract."""


class HookError(SlimeError, TypeError):
    """A user function could not be loaded or does not satisfy its documented contract."""


class HookExited(SlimeError, RuntimeError):
    """A user function raised what ends a process or a task, not an error: `SystemExit`, `KeyboardInterrupt`, a
    cancellation that nobody asked for. Says what, and where.
    """


class LoopStalled(SlimeError, RuntimeError):
    """A function kept an event loop from turning until its process had to end. Names the function."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or the router refused, died or answered nonsense."""


class RequestRejected(EngineError):
    """The engine said that this request can never succeed (HTTP 4xx): never retried."""


class DeadlyRequest(EngineError):
    """Engines died each time when they worked on this request: never retried."""


class TakenBack(SlimeError, RuntimeError):
    """The run ended a request early: its step is over, or a checkpoint is due. The execution is tried again."""


class GroupsFailed(EngineError):
    """Too many groups of a step failed for chance: an engine, a user's function or a grader is broken."""


class Unconfined(SlimeError, RuntimeError):
    """This machine cannot hold code that a model wrote, and nobody allowed it to run unheld."""


class ActorFailed(SlimeError, RuntimeError):
    """A process of the run raised an error of another kind: a user's function, a library, a bug. Says where."""


class ClusterFailed(ActorFailed):
    """Ray itself cannot go on: a host is lost, an object with it, or memory and disk ran out. Says what Ray said."""


class ActorDied(EngineError):
    """A process of the run is gone: killed, or crashed. Names it and what is known of its end."""


class WorkerStalled(ActorDied):
    """A worker of the rollout ended itself, because code kept its event loop from turning for too long. Says where."""


class WeightSyncError(SlimeError, RuntimeError):
    """An engine does not hold exactly the weights that the trainer meant to send. Names the tensors."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to something else. Names the file."""


class NumericsError(SlimeError, ArithmeticError):
    """A trained quantity is not finite, or trainer and engine disagree beyond the limit of their dtype."""


class LedgerError(SlimeError, AssertionError):
    """Prompts issued and prompts accounted for do not add up: something was lost or trained twice."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait with a name and an owner ran out. Says who waited for whom, for how long, and the last progress seen."""

    @classmethod
    def waiting(
        cls, *, owner: str, for_what: str, limit_s: float, last_progress: str = "none", flag: str = ""
    ) -> DeadlineExceeded:
        """Builds the one message that every expired wait uses. `flag`: raises the limit."""
        said = f"{owner} waited {limit_s:.0f} s for {for_what}; last progress: {last_progress}"
        return cls(said + (f"; {flag} raises the limit" if flag else ""))
