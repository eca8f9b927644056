"""Exceptions raised by slime, one class per boundary that can fail.

A message states the problem with the offending value, why it cannot work, and what to do. Each class also derives from
the matching standard exception, so generic handlers catch it. All classes can be pickled.
"""

from __future__ import annotations

START_FLAG, SAVE_FLAG = "--engine-start-timeout-s", "--save-timeout-s"
"""Flags that set the timeouts for engine start and for saving and loading."""


class Terminated(SystemExit):
    """The process received SIGTERM. It cleans up as it does after Ctrl-C and exits with code 143."""


class Unfinished(SystemExit):
    """The run was asked to stop early, and stopped after a step. Its exit code is `AGAIN` if it can be continued."""


AGAIN = 75
"""Exit code (EX_TEMPFAIL of sysexits.h): the run is not complete, and the same command continues it."""


class SlimeError(Exception):
    engines: tuple[str, ...] = ()
    """Addresses of the failed engines, set only if other engines did not fail."""


class ConfigError(SlimeError, ValueError):
    """A setting is unknown, contradictory or unsatisfiable. Raised before any process starts."""

    num_hosts: int | None = None
    """The number of training hosts with which the run could start. None: unknown, or none."""


class DataError(SlimeError, ValueError):
    """A dataset, row or sample violates its contract."""


class HookError(SlimeError, TypeError):
    """A user function cannot be loaded or violates its documented contract."""


class HookExited(SlimeError, RuntimeError):
    """A user function raised `SystemExit`, `KeyboardInterrupt` or an unrequested `CancelledError`."""


class LoopStalled(SlimeError, RuntimeError):
    """A function blocked an event loop for too long, so the process exited. The message names the function."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or the router rejected a request, died, or sent an invalid response."""


class RequestRejected(EngineError):
    """The engine rejected a request that cannot succeed (HTTP 4xx). Never retried."""


class SampledPlaceholder(RequestRejected):
    """The model sampled the placeholder of an image, video or audio, which an engine would read as such in a later
    request. The execution starts over.
    """


class DeadlyRequest(EngineError):
    """Every engine that processed this request died. Never retried."""


class TakenBack(SlimeError, RuntimeError):
    """The run cancelled a request because the step ended or a checkpoint is due. The execution is retried."""


class GroupsFailed(EngineError):
    """So many groups of a step failed that it cannot be chance: an engine, user function or grader is broken."""


class Unconfined(SlimeError, RuntimeError):
    """This machine cannot sandbox model-written code, and the user did not allow running it without a sandbox."""


class ActorFailed(SlimeError, RuntimeError):
    """A process in the run raised an unexpected error in user code, a library or slime. The message says where."""


class ClusterFailed(ActorFailed):
    """Ray failed: it lost a host or an object, or ran out of memory or disk. The message quotes Ray's error."""


class ActorDied(EngineError):
    """A process of the run was killed or crashed. The message says which one and how it exited."""


class WorkerStalled(ActorDied):
    """A rollout worker exited because code blocked its event loop for too long. The message says where."""


class WeightSyncError(SlimeError, RuntimeError):
    """An engine's weights differ from the ones that the trainer sent. The message names the tensors."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is missing, corrupt or from a different model or run. The message names the file."""


class DiskFull(SlimeError, OSError):
    """A disk or quota is full. The message names the folder and its free space."""


class NumericsError(SlimeError, ArithmeticError):
    """A training value is not finite, or trainer and engine differ by more than their dtype allows."""


class LedgerError(SlimeError, AssertionError):
    """The ledger does not balance: a prompt was lost or trained on twice."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait timed out. The message says who waited for what, for how long, and what progress was last seen."""

    @classmethod
    def waiting(
        cls, *, owner: str, for_what: str, limit_s: float, last_progress: str = "none", flag: str = ""
    ) -> DeadlineExceeded:
        """Builds the error with the standard timeout message. `flag`: the setting that raises the limit."""
        said = f"{owner} waited {limit_s:.0f} s for {for_what}; last progress: {last_progress}"
        return cls(said + (f"; {flag} raises the limit" if flag else ""))


class Hung(DeadlineExceeded):
    """Processes of the run stood still for longer than `--hang-limit-s`. The message says who waited for whom."""
