"""The errors that slime raises on purpose, one class for each boundary that can fail.

A message says what is wrong, with the value, why that cannot work, and what to do. Each class also derives from the
matching standard exception, so that ordinary handlers catch it. All of them pickle.
"""

from __future__ import annotations

START_FLAG, SAVE_FLAG = "--engine-start-timeout-s", "--save-timeout-s"
"""The flags for two time limits: engine start, and saving and loading."""


class Terminated(SystemExit):
    """SIGTERM arrived. The process cleans up as after Ctrl-C and exits with code 143."""


class SlimeError(Exception):
    engines: tuple[str, ...] = ()
    """Addresses of the failed engines, if only some of them failed."""


class ConfigError(SlimeError, ValueError):
    """A setting is unknown, contradictory or impossible. Raised before any process starts."""


class DataError(SlimeError, ValueError):
    """A dataset, a row or a sample breaks its contract."""


class HookError(SlimeError, TypeError):
    """A user function cannot be loaded or breaks its documented contract."""


class HookExited(SlimeError, RuntimeError):
    """A user function raised `SystemExit`, `KeyboardInterrupt` or an unrequested `CancelledError`."""


class LoopStalled(SlimeError, RuntimeError):
    """A function blocked an event loop for so long that the process had to exit. The message names the function."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or the router refused, died or gave an invalid answer."""


class RequestRejected(EngineError):
    """The engine refused a request that cannot succeed (HTTP 4xx). Never retried."""


class DeadlyRequest(EngineError):
    """Every engine that worked on this request died. Never retried."""


class TakenBack(SlimeError, RuntimeError):
    """The run cancelled a request, because the step is over or a checkpoint is due. The execution is tried again."""


class GroupsFailed(EngineError):
    """More groups of a step failed than chance explains: an engine, a user's function or a grader is broken."""


class Unconfined(SlimeError, RuntimeError):
    """This machine cannot confine code that a model wrote, and the user did not allow running it unconfined."""


class ActorFailed(SlimeError, RuntimeError):
    """A process of the run raised an unforeseen error, in a user's function, a library, or slime. Says where."""


class ClusterFailed(ActorFailed):
    """Ray failed: it lost a host or an object, or ran out of memory or disk. Quotes Ray's message."""


class ActorDied(EngineError):
    """A process of the run was killed or crashed. Says which one and how it ended."""


class WorkerStalled(ActorDied):
    """A rollout worker exited because code blocked its event loop for too long. Says where."""


class WeightSyncError(SlimeError, RuntimeError):
    """An engine does not hold exactly the weights that the trainer sent. Names the tensors."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to a different model or run. Names the file."""


class DiskFull(SlimeError, OSError):
    """A disk or a quota is full. Names the folder and its free space."""


class NumericsError(SlimeError, ArithmeticError):
    """A trained quantity is not finite, or trainer and engine disagree by more than their dtype allows."""


class LedgerError(SlimeError, AssertionError):
    """The ledger does not balance: a prompt was lost or trained twice."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait exceeded its limit. Says who waited for whom, for how long, and the last progress."""

    @classmethod
    def waiting(
        cls, *, owner: str, for_what: str, limit_s: float, last_progress: str = "none", flag: str = ""
    ) -> DeadlineExceeded:
        """Builds the error with the message that all waits share. `flag`: the setting that raises the limit."""
        said = f"{owner} waited {limit_s:.0f} s for {for_what}; last progress: {last_progress}"
        return cls(said + (f"; {flag} raises the limit" if flag else ""))
