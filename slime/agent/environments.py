"""RL environments of other projects. Each runs in a virtual environment of its own and plays against the run's adapter.

    slime env tasks verifiers --environment-config sums.yaml --to sums.jsonl
    slime train ... --prompt-data sums.jsonl --input-key prompt --metadata-key metadata \\
        --custom-generate-function-path slime.agent.environments:generate

A row's metadata names the environment (`EnvironmentSpec`) and the task. `generate` starts `environment_runner.py` with
the environment's interpreter, one process per environment and rollout process, lends it the adapter's address and a
key, and takes the environment's score as the reward.

Invariants
1. Nothing of an environment is imported here, and slime is not importable there: packages never meet.
2. A process ends with the engine client, or when this process dies, because its standard input closes.
3. An episode that the environment could not play or score is a failed execution, never a reward of zero. An episode
   gets zero without a score only if it reached a limit of the run.
4. A virtual environment is used only if `COMPLETE` is in its folder, which is written after the last package.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from slime.agent.execution import execution
from slime.core.blame import how_it_ended
from slime.core.errors import ConfigError, DeadlineExceeded, SlimeError
from slime.core.files import tail_of
from slime.core.processes import RUN_ID_ENV
from slime.core.sample import Sample, Status
from slime.core.text import nearest
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import current
from slime.rollout.guard import waiting
from slime.rollout.traces import traced
from slime.settings import Args

logger = logging.getLogger(__name__)

SPEC, TASK, INFO = "environment", "task", "environment_info"
"""Keys of a sample's metadata: the environment, the task, and what the environment said about the episode."""
START_LIMIT_S = 600.0
"""Limit for loading an environment and its servers."""
INSTALL_LIMIT_S = 1800.0
"""Limit for creating a virtual environment, and for waiting until another process has created it."""
END_LIMIT_S = 20.0
COMPLETE = "complete.json"
RUNNER = Path(__file__).with_name("environment_runner.py")
MAX_ANSWER_BYTES = 1 << 26
FOLDER_ENV = "SLIME_ENVIRONMENT_DIR"
"""Environment variable that sets the folder of virtual environments."""
PASSED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    RUN_ID_ENV,
)
"""Variables of this process that an environment's process gets, besides those in its specification."""


@dataclass(frozen=True, slots=True)
class Ecosystem:
    """A project whose environments `environment_runner.py` can run."""

    package: str
    version: str
    """The version that is installed, unless the specification names an interpreter."""
    needs: str
    """What an environment needs besides PyPI."""
    python: tuple[int, int] = (3, 11)
    """The oldest Python that can run it."""
    more: tuple[str, ...] = ()
    """Further packages."""

    @property
    def requirements(self) -> tuple[str, ...]:
        return (f"{self.package}=={self.version}", *self.more)


ENVIRONMENTS: dict[str, Ecosystem] = {
    "verifiers": Ecosystem(
        "verifiers",
        "0.4.0",
        "a taskset of your own, or one from PyPI; PyPI also when a process plays its first episode",
        more=("uv==0.13.9",),
    ),
    "openenv": Ecosystem("openenv", "0.10.0", "an environment of your own, as openenv init makes it"),
    "nemo_gym": Ecosystem(
        "nemo-gym", "0.4.0", "nothing for resources servers that are in the package with examples", python=(3, 12)
    ),
    "textarena": Ecosystem("textarena", "0.7.4", "nothing for games for one player without word lists"),
    "reasoning_gym": Ecosystem("reasoning-gym", "0.1.25", "nothing"),
}
"""Name -> ecosystem, in the order of `slime env list`."""


class EnvironmentFailed(SlimeError, RuntimeError):
    """An environment's process died, or could not play or score an episode. The message quotes it."""


class LimitReached(SlimeError, RuntimeError):
    """The episode ended at a limit of the run before the environment scored it."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment, as a dataset's row describes it under `metadata.environment`."""

    kind: str
    """A key of `ENVIRONMENTS`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own settings; `environment_runner.py` lists those of each kind."""
    packages: tuple[str, ...] = ()
    """Requirements of the environment, for pip, besides the ecosystem's package."""
    path: tuple[str, ...] = ()
    """Folders from which the environment's process imports modules."""
    python: str | None = None
    """An existing interpreter with all packages. None: create a virtual environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""

    def __post_init__(self) -> None:
        if self.kind not in ENVIRONMENTS:
            near = nearest(self.kind, ENVIRONMENTS)
            raise ConfigError(
                f"there is no environment {self.kind!r}; "
                + (f"did you mean {near}? " if near else "")
                + f"choose from {', '.join(ENVIRONMENTS)}"
            )

    @classmethod
    def of_row(cls, metadata: Mapping[str, Any]) -> EnvironmentSpec:
        """Reads a row's metadata. Raises `ConfigError`."""
        given = metadata.get(SPEC)
        if not isinstance(given, dict) or TASK not in metadata:
            raise ConfigError(
                f"a row's metadata has no {SPEC} or no {TASK}, so no environment can play it; write the dataset with "
                "slime env tasks, and pass --metadata-key metadata"
            )
        try:
            return cls(**{**given, "packages": tuple(given.get("packages", ())), "path": tuple(given.get("path", ()))})
        except TypeError as error:
            raise ConfigError(
                f"the {SPEC} of a row is {given}, which is not a specification ({error}); write the dataset with "
                "slime env tasks"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Returns what `of_row` reads, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def digest(self) -> str:
        return _digest(self.to_dict())

    @property
    def requirements(self) -> tuple[str, ...]:
        return (*ENVIRONMENTS[self.kind].requirements, *self.packages)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# --- Virtual environments


def environments_folder() -> Path:
    """Returns the folder of virtual environments: `SLIME_ENVIRONMENT_DIR`, or one in the user's cache folder."""
    if given := os.environ.get(FOLDER_ENV):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "environments"


@functools.cache
def base_python(oldest: tuple[int, int]) -> Path:
    """Returns an interpreter of at least this version: this one, or else one on PATH or of pyenv.

    Raises `ConfigError` if there is none.
    """
    if sys.version_info[:2] >= oldest:
        return Path(sys.executable)
    names = [f"python{oldest[0]}.{minor}" for minor in range(oldest[1], oldest[1] + 4)]
    on_path = (found for name in names if (found := shutil.which(name)))
    of_pyenv = (str(one) for name in names for one in Path.home().glob(f".pyenv/versions/*/bin/{name}"))
    for candidate in itertools.chain(on_path, of_pyenv):
        tried = subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True, check=False)
        if tried.returncode == 0:
            return Path(candidate)
    raise ConfigError(
        f"this environment needs Python {oldest[0]}.{oldest[1]} or newer, and neither PATH nor pyenv has one; install "
        "one, or pass an interpreter with the environment's packages (--environment-python)"
    )


def installed(spec: EnvironmentSpec) -> Path | None:
    """Returns the interpreter of an environment, or None if its virtual environment has not been created yet."""
    if spec.python is not None:
        return Path(spec.python)
    folder = _folder(spec, base_python(ENVIRONMENTS[spec.kind].python))
    return _python_of(folder) if (folder / COMPLETE).is_file() else None


def interpreter(spec: EnvironmentSpec, say: Callable[[str], None] = logger.info) -> Path:
    """Returns the interpreter of an environment, and creates its virtual environment on first use. Blocks.

    `say`: gets a line when the work starts and when it ends. Raises `ConfigError`, or `DeadlineExceeded`.
    """
    if spec.python is not None:
        if not os.access(spec.python, os.X_OK):
            raise ConfigError(f"--environment-python is {spec.python}, which is not a program; check the path")
        return Path(spec.python)
    base = base_python(ENVIRONMENTS[spec.kind].python)
    folder = _folder(spec, base)
    if not (folder / COMPLETE).is_file():
        with _locked(folder.with_suffix(".lock"), say):
            if not (folder / COMPLETE).is_file():
                _create(folder, base, spec.requirements, say)
    return _python_of(folder)


def _folder(spec: EnvironmentSpec, base: Path) -> Path:
    return environments_folder() / f"{spec.kind}-{_digest([str(base.resolve()), spec.requirements])}"


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock file, so that only one process creates a folder. Raises `DeadlineExceeded`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline, told = time.monotonic() + INSTALL_LIMIT_S, False
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"another process creates {path.with_suffix('')}; waiting for it")
                told = True
                if time.monotonic() > deadline:
                    raise DeadlineExceeded.waiting(
                        owner="this process", for_what=f"the lock {path}", limit_s=INSTALL_LIMIT_S
                    ) from None
                time.sleep(0.5)
        yield


def _create(folder: Path, base: Path, requirements: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Creates a virtual environment, with uv if there is one, because it takes a fraction of pip's time; pip follows if
    uv fails, since only pip reads pip's configuration.
    """
    log, began, python = folder.with_suffix(".log"), time.monotonic(), str(_python_of(folder))
    say(f"creating the virtual environment {folder} for {' '.join(requirements)}; log: {log}")
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    with log.open("wb") as output:
        if problem := _problem([str(base), "-m", "venv", str(folder)], log, output):
            raise ConfigError(problem)
        if uv is None or _problem([uv, "pip", "install", "--python", python, *requirements], log, output):
            pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *requirements]
            if problem := _problem(pip, log, output):
                raise ConfigError(
                    f"{problem}; if this machine cannot reach PyPI, pass an interpreter with the packages "
                    "(--environment-python)"
                )
    (folder / COMPLETE).write_text(json.dumps({"requirements": requirements, "python": str(base)}))
    say(f"created {folder} in {time.monotonic() - began:.0f} s")


def _problem(command: list[str], log: Path, output: IO[bytes]) -> str | None:
    """Runs a command with its output in a log. Returns how it failed, or None. Raises `DeadlineExceeded`."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    try:
        ended = subprocess.run(command, timeout=INSTALL_LIMIT_S, check=False, **given)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded.waiting(
            owner="this process", for_what=" ".join(command), limit_s=INSTALL_LIMIT_S
        ) from None
    if ended.returncode == 0:
        return None
    return f"{' '.join(command)} {how_it_ended(ended.returncode)}: {tail_of(log, 1500).strip()}"


# --- Processes


class EnvironmentProcess:
    """A running `environment_runner.py`. For use on one event loop."""

    def __init__(self, spec: EnvironmentSpec, log: Path) -> None:
        self.spec, self.log = spec, log
        self.version = ""
        """The version of the ecosystem's package, once started."""
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reading.done()

    async def start(self, python: Path) -> None:
        """Starts the process and waits until the environment is loaded.

        Raises `ConfigError` if the environment cannot be loaded, `EnvironmentFailed` if its process dies, and
        `DeadlineExceeded`.
        """
        home = environments_folder() / "home"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(str(python), "-P", str(RUNNER), self.spec.kind),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment_of(self.spec, python, home),
                cwd=home,
                start_new_session=True,
                limit=MAX_ANSWER_BYTES,
            )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._write({"config": self.spec.config})
                assert self._process.stdout is not None, "stdout is a pipe"
                line = await self._process.stdout.readline()
        except TimeoutError:
            await self.close()
            raise DeadlineExceeded.waiting(
                owner="the rollout", for_what=f"the environment {self.spec.kind}", limit_s=START_LIMIT_S
            ) from None
        except BaseException:
            await self.close()
            raise
        said = json.loads(line) if line else {}
        if "ready" not in said:
            await self.close()
            if "error" in said:
                raise ConfigError(f"the environment {self.spec.kind} cannot be loaded: {self._in_words(said['error'])}")
            raise EnvironmentFailed(self._death())
        self.version = said["ready"]["version"]
        self._reading = asyncio.create_task(self._read())

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read(self) -> None:
        """Hands out answers until the process ends, then fails the remaining calls."""
        assert self._process.stdout is not None, "stdout is a pipe"
        try:
            while line := await self._process.stdout.readline():
                said = json.loads(line)
                call = self._calls.get(said["id"])
                if call is not None and not call.done():
                    call.set_result(said)
            self._kill_group()  # servers that a dead runner leaves behind
            await self._process.wait()
        finally:
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(EnvironmentFailed(self._death()))

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Returns up to `count` tasks from position `first`: `{"prompt": text for people, "task": ...}`."""
        found: list[dict[str, Any]] = await self._call(call="tasks", first=first, count=count)
        return found

    async def play(self, task: Any, url: str, key: str) -> dict[str, Any]:
        """Plays an episode against the model at `url`. Returns `{"reward": ..., "info": ...}`.

        Raises `LimitReached` if the model's endpoint refused a request, and `EnvironmentFailed`.
        """
        with traced("environment: episode", environment=self.spec.kind):
            played: dict[str, Any] = await self._call(call="play", task=task, url=url, key=key)
        return played

    async def _call(self, **request: Any) -> Any:
        if not self.alive:
            raise EnvironmentFailed(self._death())
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **request})
            said = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, RuntimeError):
                self._write({"call": "cancel", "target": number})
            raise
        finally:
            del self._calls[number]
        if "error" in said:
            words = self._in_words(said["error"])
            if said["error"]["refused"]:
                raise LimitReached(words)
            raise EnvironmentFailed(f"the environment {self.spec.kind} could not do it: {words}")
        return said["value"]

    def _in_words(self, error: Mapping[str, Any]) -> str:
        return f"{error['message']} (log: {self.log})"

    def _death(self) -> str:
        ended = how_it_ended(self._process.returncode)
        with contextlib.suppress(OSError):
            ended += f"; the end of its log {self.log}: {tail_of(self.log, 1500).strip()}"
        return f"the process of the environment {self.spec.kind} {ended}"

    async def close(self) -> None:
        """Ends the process and everything it started. Idempotent."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.close()  # the runner stops its servers and kills its group
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await self._process.wait()
        self._kill_group()
        await self._process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def environment_of(spec: EnvironmentSpec, python: Path, home: Path) -> dict[str, str]:
    """Returns the variables of an environment's process. Its programs come first on PATH."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    passed["PATH"] = os.pathsep.join([str(python.parent), passed.get("PATH", os.defpath)])
    own = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(spec.path), "PYTHONUNBUFFERED": "1"}
    direct = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return {**passed, **own, **direct, **spec.variables}


# --- In a run

_PROCESSES: dict[EngineClient, dict[str, asyncio.Task[EnvironmentProcess]]] = {}
"""Open client -> digest of the specification -> the task that starts its process."""


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: plays the row's task in the row's environment, whose score is the reward.

    What the environment said about the episode is in `metadata["environment_info"]`.
    """
    process = await _running(EnvironmentSpec.of_row(sample.metadata))
    async with execution(sampling_params) as agent:
        try:
            played = await process.play(sample.metadata[TASK], agent.url, agent.key)
        except LimitReached as limit:
            samples = agent.samples(sample, reward=0.0, metadata={INFO: {"end": str(limit)}})
            if any(one.status in (Status.TRUNCATED, Status.ABORTED) for one in samples):
                return samples
            raise EnvironmentFailed(f"the adapter refused a request of {process.spec.kind}: {limit}") from limit
        return agent.samples(sample, reward=float(played["reward"]), metadata={INFO: played["info"]})


async def _running(spec: EnvironmentSpec) -> EnvironmentProcess:
    """Returns the environment's process. The first episode starts it, as does one that finds it dead."""
    client = current().engine()
    if client not in _PROCESSES:
        _PROCESSES[client] = {}
        client.at_close(lambda: _end(client))
    held = _PROCESSES[client].get(spec.digest)
    if held is None or (held.done() and (held.cancelled() or held.exception() or not held.result().alive)):
        if held is not None and not held.cancelled() and not held.exception():
            logger.warning("%s; starting it again", held.result()._death())
        log = Path(current().args.run_dir, "logs", f"environment_{spec.kind}_{spec.digest}_{os.getpid()}.log")
        held = _PROCESSES[client][spec.digest] = asyncio.create_task(started(spec, log))
    with waiting():  # the start has limits of its own
        return await asyncio.shield(held)


async def started(spec: EnvironmentSpec, log: Path, say: Callable[[str], None] = logger.info) -> EnvironmentProcess:
    """Starts an environment's process. `say`: see `interpreter`. Raises as `interpreter` and `start` do."""
    python = await asyncio.to_thread(interpreter, spec, say)
    process = EnvironmentProcess(spec, log)
    await process.start(python)
    logger.info("environment %s: %s %s", spec.kind, ENVIRONMENTS[spec.kind].package, process.version)
    return process


async def _end(client: EngineClient) -> None:
    starts = list(_PROCESSES.pop(client, {}).values())
    for start in starts:
        start.cancel()
    for result in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(result, EnvironmentProcess):
            await result.close()
