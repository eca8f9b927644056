"""Environments of other projects: what a row says, what a process gets, and what becomes of its answers and its death.

The processes are real. Their environment is a hand-made package under the name of TextArena, so nothing is installed.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slime.agent import environment_runner
from slime.agent.environments import (
    COMPLETE,
    ENVIRONMENTS,
    FOLDER_ENV,
    PASSED,
    RUNNER,
    SPEC,
    TASK,
    EnvironmentFailed,
    EnvironmentProcess,
    EnvironmentSpec,
    LimitReached,
    _folder,
    base_python,
    environment_of,
    installed,
    interpreter,
)
from slime.cli.environments import table, transcript
from slime.cli.main import main
from slime.core.errors import ConfigError
from slime.core.sample import Sample, Status

GAME = """
import os, random
class Game:
    def reset(self, num_players, seed):
        self.secret = str(random.randint(0, 9))
    def get_observation(self):
        return 0, "Guess."
    def step(self, action):
        if action == "die":
            os._exit(7)
        self.right = action == self.secret
        return True, {}
    def close(self):
        return {0: float(self.right)}, {0: {"reason": "over"}}
def make(env_id):
    if env_id != "Digits-v0":
        raise KeyError(env_id)
    return Game()
"""


class Model:
    """An endpoint of OpenAI's API with a fixed answer, on loopback."""

    def __init__(self, says: str = "5", status: int = 200) -> None:
        model = self
        self.says, self.status, self.keys = says, status, list[str | None]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                model.keys.append(self.headers["Authorization"])
                body = json.dumps({"choices": [{"message": {"content": model.says}}]}).encode()
                self.send_response(model.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *given: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSpec:
    """A game of one turn, as a package that the environment's process imports."""
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "environments"))
    (tmp_path / "textarena.py").write_text(GAME)
    (tmp_path / "textarena-9.9.dist-info").mkdir()
    (tmp_path / "textarena-9.9.dist-info" / "METADATA").write_text("Name: textarena\nVersion: 9.9\n")
    return EnvironmentSpec("textarena", {"game": "Digits-v0"}, path=(str(tmp_path),), python=sys.executable)


def with_process(spec: EnvironmentSpec, log: Path, use: Callable[[EnvironmentProcess], Awaitable[None]]) -> None:
    """Starts the environment, calls `use`, and ends it."""

    async def run() -> None:
        process = EnvironmentProcess(spec, log)
        await process.start(interpreter(spec))
        try:
            async with asyncio.timeout(60):
                await use(process)
        finally:
            await process.close()

    asyncio.run(run())


def test_an_episode_is_scored_by_the_environment(digits: EnvironmentSpec, model: Model, tmp_path: Path) -> None:
    """Law: the reward is the game's, for each seed; the model gets the key of the episode."""
    import random

    async def use(process: EnvironmentProcess) -> None:
        assert process.version == "9.9"
        tasks = await process.tasks(3, 8)
        assert [one["task"] for one in tasks] == [{"seed": seed} for seed in range(3, 11)]
        played = await asyncio.gather(*(process.play(one["task"], model.url, "key") for one in tasks))
        wanted = [float(random.Random(seed).randint(0, 9) == 5) for seed in range(3, 11)]
        assert [one["reward"] for one in played] == wanted
        assert all(one["info"] == {"end": "over", "turns": 1} for one in played)
        assert set(model.keys) == {"Bearer key"}

    with_process(digits, tmp_path / "log", use)


def test_an_endpoint_that_fails_is_no_reward_of_zero(digits: EnvironmentSpec, model: Model, tmp_path: Path) -> None:
    """Law: HTTP 503 is a failure. HTTP 400, a limit of the run, ends the game with what it has."""

    async def use(process: EnvironmentProcess) -> None:
        model.status = 503
        with pytest.raises(EnvironmentFailed, match="HTTP 503"):
            await process.play({"seed": 0}, model.url, "key")
        model.status = 400
        assert (await process.play({"seed": 0}, model.url, "key"))["info"]["end"] == "limit"
        assert process.alive

    with_process(digits, tmp_path / "log", use)


def test_a_process_that_dies_fails_its_episodes(digits: EnvironmentSpec, model: Model, tmp_path: Path) -> None:
    """Law: a death ends every waiting call with the exit code, and no later call waits."""
    model.says = "die"

    async def use(process: EnvironmentProcess) -> None:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="exited with code 7"):
                await process.play({"seed": 0}, model.url, "key")
        assert not process.alive

    with_process(digits, tmp_path / "log", use)


def test_an_environment_that_cannot_be_loaded_ends_the_run(digits: EnvironmentSpec, tmp_path: Path) -> None:
    """Law: the error is one that no retry repeats, and quotes the environment."""

    async def use(process: EnvironmentProcess) -> None:
        raise AssertionError("it was started")

    wrong = EnvironmentSpec("textarena", {"game": "Chess-v9"}, path=digits.path, python=digits.python)
    with pytest.raises(ConfigError, match=r"cannot be loaded: KeyError: 'Chess-v9'"):
        with_process(wrong, tmp_path / "log", use)


def test_the_process_ends_with_its_standard_input(digits: EnvironmentSpec, tmp_path: Path) -> None:
    """Law: an owner that is killed leaves no process, because the kernel closes the pipe."""

    async def use(process: EnvironmentProcess) -> None:
        assert process._process.stdin is not None
        process._process.stdin.close()
        assert await process._process.wait() == -signal.SIGKILL  # it kills its own group

    with_process(digits, tmp_path / "log", use)


def test_a_refusal_is_told_from_a_failure(tmp_path: Path) -> None:
    """Law: only HTTP 400 raises `Refused`, which the rollout process sees as `LimitReached`."""
    assert environment_runner._told(environment_runner.Refused("too long")) == {"message": "too long", "refused": True}
    assert environment_runner._told(ValueError("no")) == {"message": "ValueError: no", "refused": False}
    assert issubclass(LimitReached, RuntimeError) and not issubclass(LimitReached, EnvironmentFailed)


def test_a_process_gets_a_short_fixed_list_of_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: no key or token of this process reaches an environment."""
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHONHOME"):
        monkeypatch.setenv(name, "secret")
    spec = EnvironmentSpec("openenv", path=("/a", "/b"), variables={"MINE": "1"})
    found = environment_of(spec, tmp_path / "bin" / "python", tmp_path)
    assert set(found) <= {*PASSED, "HOME", "PYTHONPATH", "NO_PROXY", "no_proxy", "PYTHONUNBUFFERED", "MINE"}
    assert "secret" not in found.values() and found["PYTHONPATH"] == "/a:/b" and found["HOME"] == str(tmp_path)
    assert found["PATH"].startswith(f"{tmp_path}/bin{os.pathsep}")


def test_the_runner_knows_the_listed_environments_and_imports_nothing_of_slime() -> None:
    """Law: both tables have the same names and packages; the file needs only the standard library."""
    assert {name: one.package for name, one in ENVIRONMENTS.items()} == {
        name: kind.package for name, kind in environment_runner.KINDS.items()
    }
    tree = ast.parse(RUNNER.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {a.name for node in imports if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_row_describes_its_environment(tmp_path: Path) -> None:
    """Law: a specification survives a row; a row without one, or with a wrong one, is refused with what to do."""
    spec = EnvironmentSpec("verifiers", {"taskset": {"id": "mine"}}, packages=("a==1",), path=(str(tmp_path),))
    assert EnvironmentSpec.of_row(json.loads(json.dumps({SPEC: spec.to_dict(), TASK: 1}))) == spec
    with pytest.raises(ConfigError, match="slime env tasks"):
        EnvironmentSpec.of_row({})
    with pytest.raises(ConfigError, match="not a specification"):
        EnvironmentSpec.of_row({SPEC: {"kind": "verifiers", "colour": "red"}, TASK: 1})
    with pytest.raises(ConfigError, match="did you mean verifiers"):
        EnvironmentSpec("verifier")


def test_other_packages_are_another_virtual_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: the folder depends on the packages, and counts only once it is complete."""
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path))
    base = base_python((3, 11))
    one, other = EnvironmentSpec("openenv"), EnvironmentSpec("openenv", packages=("numpy",))
    assert _folder(one, base) != _folder(other, base)
    assert _folder(one, base) == _folder(EnvironmentSpec("openenv", {"app": "a:b"}), base)
    assert installed(one) is None
    _folder(one, base).mkdir(parents=True)
    assert installed(one) is None
    (_folder(one, base) / COMPLETE).write_text("{}")
    assert installed(one) == _folder(one, base) / "bin" / "python" and installed(other) is None
    with pytest.raises(ConfigError, match="is not a program"):
        interpreter(EnvironmentSpec("openenv", python=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("5", {"number": 5}),
        ('{"number": 5}', {"number": 5}),
        ('```json\n{"number": 5}\n```', {"number": 5}),
        ('{"digit": 5}', None),
        ("five", None),
        ("", None),
    ],
)
def test_actions_in_messages(said: str, action: dict[str, Any] | None) -> None:
    schema = {"required": ["number"], "properties": {"number": {"type": "integer"}}}
    assert environment_runner._action(said, schema) == action


def test_the_command_lists_environments_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path))
    lines = table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ENVIRONMENTS)
    assert main(["env", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    for words, message in (
        (["tasks"], "needs the name of an environment"),
        (["tasks", "nemogym", "--to", "x"], "did you mean nemo_gym"),
        (["tasks", "openenv"], "--to FILE"),
        (["try", "openenv"], "--hf-checkpoint DIR"),
        (["list", "--lr", "1"], "one argument too many"),
        (["tasks", "openenv", "--to", "x", "--environment-path", "/nowhere"], "is not a folder"),
    ):
        assert main(["env", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_transcript_shows_every_token_once() -> None:
    """Law: the parts cover the sample's tokens, and control characters cannot reach the terminal."""
    sample = Sample(tokens=[1, 2, 3, 4], response_length=2, loss_mask=[1, 1], status=Status.COMPLETED, reward=0.5)
    sample.metadata = {"agent": {"turns": 1, "origins": [[0, 2, "user"], [2, 5, "sampled"]]}, "environment_info": {}}
    text = transcript(sample, lambda ids: f"{ids}\x1b")
    assert "--- user, 2 tokens\n[1, 2]" in text and "--- sampled, 2 tokens\n[3, 4]" in text
    assert "reward 0.5, 1 turns, 4 tokens, 2 sampled" in text and "\x1b" not in text
