"""The errors that slime raises on purpose, one for each boundary that can fail.

A message says what is wrong, with the value, why that cannot work, and what to do. Each class is also the matching
standard exception, so that ordinary handlers work. All of them pickle.
"""

from __future__ import annotations

START_FLAG, SAVE_FLAG = "--engine-start-timeout-s", "--save-timeout-s"
"""Flags that raise the limits of starting, and of saving and loading."""


class Terminated(SystemExit):
    """SIGTERM arrived. Everything unwinds as after Ctrl-C; the exit code is 143."""


class SlimeError(Exception):
    engines: tuple[str, ...] = ()
    """Addresses of the engines that failed, if only some of several did."""


class ConfigError(SlimeError, ValueError):
    """The user asked for something unknown, contradictory or impossible; raised before any process starts."""


class DataError(SlimeError, ValueError):
    """A dataset, a row or a sample breaks its contract."""


class HookError(SlimeError, TypeError):
    """A user function cannot be loaded or breaks its documented contract."""


class HookExited(SlimeError, RuntimeError):
    """A user function raised `SystemExit`, `KeyboardInterrupt` or a cancellation that nobody asked for."""


class LoopStalled(SlimeError, RuntimeError):
    """A function blocked an event loop until its process had to end. Names the function."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or the router refused, died or gave an invalid answer."""


class RequestRejected(EngineError):
    """The engine says that this request can never succeed (HTTP 4xx); never retried."""


class DeadlyRequest(EngineError):
    """Every engine that worked on this request died; never retried."""


class TakenBack(SlimeError, RuntimeError):
    """The run ended a request early, because its step is over or a checkpoint is due. The execution is tried again."""


class GroupsFailed(EngineError):
    """More groups of a step failed than chance explains: an engine, a user's function or a grader is broken."""


class Unconfined(SlimeError, RuntimeError):
    """This machine cannot confine code that a model wrote, and the user did not allow running it unconfined."""


class ActorFailed(SlimeError, RuntimeError):
    """A process of the run raised some other error: in a user's function, a library, or by a bug. Says where."""


class ClusterFailed(ActorFailed):
    """Ray cannot go on: it lost a host or an object, or memory or disk ran out. Quotes Ray."""


class ActorDied(EngineError):
    """A process of the run was killed or crashed. Says which one and how it ended."""


class WorkerStalled(ActorDied):
    """A rollout worker ended itself, because code blocked its event loop for too long. Says where."""


class WeightSyncError(SlimeError, RuntimeError):
    """An engine does not hold exactly the weights that the trainer sent. Names the tensors."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to another model or run. Names the file."""


class NumericsError(SlimeError, ArithmeticError):
    """A trained quantity is not finite, or trainer and engine disagree by more than their dtype allows."""


class LedgerError(SlimeError, AssertionError):
    """The ledger does not balance: a prompt was lost or trained twice."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait ran out. Says who waited for whom, for how long, and the last progress."""

    @classmethod
    def waiting(
        cls, *, owner: str, for_what: str, limit_s: float, last_progress: str = "none", flag: str = ""
    ) -> DeadlineExceeded:
        """The message of every expired wait. `flag`: the setting that raises the limit."""
        said = f"{owner} waited {limit_s:.0f} s for {for_what}; last progress: {last_progress}"
        return cls(said + (f"; {flag} raises the limit" if flag else ""))
