"""Runs episodes of an environment in the environment's own virtual environment; `environments.py` starts this file.

    python -P environment_runner.py KIND        (with the environment's interpreter; slime is not installed there)

It reads one JSON object per line from standard input and writes one per line to the descriptor that was its standard
output: the first line must be `{"config": {...}}` and is answered with `{"ready": {...}}` or `{"error": {...}}`. Then
`{"id": 1, "call": "tasks", ...}`, `"play"` and `"cancel"` are answered with `{"id": 1, "value": ...}` or an error.

Invariants
1. Everything that an environment prints goes to standard error, so it cannot corrupt the answers.
2. Servers listen on loopback. They run in this process or in its children, and end with it.
3. When standard input closes, this process kills its process group and ends.
4. `refused` in an error means: the model's endpoint answered a request of the episode with HTTP 400, which it does at a
   limit of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = "slime"
START_S = 120.0
REQUEST_S = 3600.0
"""Limit of one request to the model. The run has its own limits; this one only ends a thread that nobody waits for."""
MOST_EPISODES = 512
"""Threads for requests to the model, which is also the number of episodes that make one at the same time."""


class Refused(Exception):
    """The model's endpoint answered with HTTP 400, so the episode has reached a limit of the run."""


class Endpoint:
    """The model of one episode."""

    def __init__(self, url: str, key: str, threads: ThreadPoolExecutor) -> None:
        self.url, self.key, self._threads = url, key, threads

    async def say(self, messages: list[dict[str, str]]) -> str:
        """Returns the model's next message. Raises `Refused`, or `OSError` for every other failure."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._say, list(messages))

    def _say(self, messages: list[dict[str, str]]) -> str:
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=REQUEST_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code == 400:
                raise Refused(said) from error
            raise OSError(f"the model's endpoint answered with HTTP {error.code}: {said}") from error
        return str(answer["choices"][0]["message"]["content"] or "")


class Kind:
    """An ecosystem. `config` is the user's, in the ecosystem's own words."""

    package: str
    """The distribution whose version is reported."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start(self) -> None:
        """Loads the environment and starts its servers."""

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Returns up to `count` tasks from position `first`: `{"prompt": text for people, "task": for play}`."""
        raise NotImplementedError

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        """Plays one episode. Returns its `reward` and `info`, a JSON object."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Ends what `start` started."""


class Verifiers(Kind):
    """`config` is the `env` block of a verifiers run: `{"taskset": {"id": ...}, "agent": {"harness": ...}}`."""

    package = "verifiers"

    async def start(self) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._types = importlib.import_module("verifiers.v1")
        self._clients = importlib.import_module("verifiers.v1.configs.client")
        context = importlib.import_module("verifiers.v1.clients").ModelContext
        sampling = importlib.import_module("verifiers.v1.types").SamplingConfig
        self._context = lambda client: context(client=client, model=MODEL, sampling=sampling())
        self._env = loaders.load_environment(loaders.resolve_env_config(self.config))
        self._numbers = itertools.count()
        self._serving = self._env.serving()
        await self._serving.__aenter__()

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        chosen = itertools.islice(iter(self._env.taskset), first, first + count)
        return [
            {"prompt": _text(task.data.prompt) or str(task.data.name), "task": task.data.model_dump(mode="json")}
            for task in chosen
        ]

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        kind = type(self._env.taskset).task_type()
        made = kind(kind.data_type().model_validate(task), self._env.config.taskset.task)
        variable = f"SLIME_API_KEY_{next(self._numbers)}"  # verifiers keeps names with API_KEY from its programs
        os.environ[variable] = endpoint.key
        try:
            client = self._clients.EvalClientConfig(base_url=f"{endpoint.url}/v1", api_key_var=variable)
            (slot,) = self._env.slots(made)
            episode = await self._env.run_slot(slot, self._context(client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok"
            if any(error.status_code == 400 for error in errors):
                raise Refused(said)
            raise RuntimeError(said)
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        info = {
            trace.agent.name: {
                "reward": trace.reward,
                "rewards": {name: reward.score for name, reward in trace.rewards.items()},
                "metrics": dict(trace.metrics),
                "stop": trace.stop_condition,
            }
            for trace in traces
        }
        return {"reward": sum(trace.reward for trace in traces) / len(traces), "info": info}

    async def stop(self) -> None:
        await self._serving.__aexit__(None, None, None)


class OpenEnv(Kind):
    """`config`: `app` (`package.server.app:app`) or `base_url`, `resets` (arguments of `reset`, one task each), `show`
    (the observation's field that the model sees; default: the whole observation as JSON), `system`, `max_turns`.
    """

    package = "openenv"

    async def start(self) -> None:
        self._client = importlib.import_module("openenv").GenericEnvClient
        self._server: subprocess.Popen[bytes] | None = None
        self._url = self.config.get("base_url")
        if self._url is None:
            port = _free_port()
            command = [sys.executable, "-P", "-m", "uvicorn", self.config["app"], "--host", "127.0.0.1"]
            self._server = subprocess.Popen([*command, "--port", str(port)], stdin=subprocess.DEVNULL)
            self._url = f"http://127.0.0.1:{port}"
        self._schema = (await self._when_up("/schema"))["action"]

    async def _when_up(self, path: str) -> dict[str, Any]:
        """Returns the server's JSON answer, once it answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(int(START_S * 10)):
            if self._server is not None and self._server.poll() is not None:
                raise RuntimeError(f"the server of {self.config['app']} exited with status {self._server.returncode}")
            with contextlib.suppress(OSError):
                answer: dict[str, Any] = json.load(await asyncio.to_thread(opener.open, f"{self._url}{path}", None, 10))
                return answer
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the environment's server at {self._url} did not answer within {START_S:.0f} s")

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        resets = self.config.get("resets") or [{"seed": seed} for seed in range(first + count)]
        return [{"prompt": f"reset {json.dumps(one)}", "task": one} for one in resets[first : first + count]]

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        shows = self.config.get("show")
        system = self.config.get("system", f"Answer with one JSON action of this schema: {json.dumps(self._schema)}")
        messages = [{"role": "system", "content": system}] if system else []
        rewards: list[float] = []
        async with self._client(base_url=self._url) as client:
            result = await client.reset(**task)
            while not result.done and len(rewards) < self.config.get("max_turns", 16):
                seen = result.observation
                shown = seen[shows] if shows else seen
                text = shown if isinstance(shown, str) else json.dumps(shown)
                messages.append({"role": "user", "content": text})
                try:
                    said = await endpoint.say(messages)
                except Refused:
                    break
                messages.append({"role": "assistant", "content": said})
                action = _action(said, self._schema)
                if action is None:  # the model's mistake ends the episode, as an invalid move does in a game
                    return {"reward": sum(rewards), "info": {"rewards": rewards, "end": "no valid action"}}
                result = await client.step(action)
                rewards.append(float(result.reward or 0.0))
        return {"reward": sum(rewards), "info": {"rewards": rewards, "end": "done" if result.done else "limit"}}

    async def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._server.wait, 5)


class NeMoGym(Kind):
    """`config`: `server` (a resources server of the package, or `module:Class`), `dataset` (JSONL rows; default: the
    package's examples), `settings` (of the resources server), `agent` (of `SimpleAgent`: `max_steps`).
    """

    package = "nemo-gym"

    async def start(self) -> None:
        name = self.config["server"]
        module = importlib.import_module(name.partition(":")[0] if ":" in name else f"resources_servers.{name}.app")
        servers = importlib.import_module("nemo_gym.server_utils")
        base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
        found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base) and v is not base]
        own = [
            v for v in found if v.__module__ == module.__name__ and v.__name__ == (name.partition(":")[2] or v.__name__)
        ]
        if len(own) != 1:
            raise ValueError(f"{module.__name__} has {len(own)} resources servers; write server as module:Class")
        self._rows = Path(self.config.get("dataset") or Path(str(module.__file__)).parent / "data" / "example.jsonl")
        agents = importlib.import_module("responses_api_agents.simple_agent.app")
        self._ports = {name: _free_port() for name in ("resources", "agent", "model")}
        table = {name: {"servers": {name: {"host": "127.0.0.1", "port": p}}} for name, p in self._ports.items()}
        dictionary = importlib.import_module("omegaconf").OmegaConf.create(table)
        head = importlib.import_module("nemo_gym.config_types").BaseServerConfig(host="127.0.0.1", port=1)
        servers.set_global_aiohttp_client(servers.GlobalAIOHTTPAsyncClientConfig())
        client = servers.ServerClient(head_server_config=head, global_config_dict=dictionary)
        model, self._refused = _keyed_model_server()
        settings = {
            "resources": (own[0], self.config.get("settings", {})),
            "agent": (
                agents.SimpleAgent,
                {
                    "resources_server": {"type": "resources_servers", "name": "resources"},
                    "model_server": {"type": "responses_api_models", "name": "model"},
                    **self.config.get("agent", {}),
                },
            ),
            "model": (
                model,
                {"openai_base_url": "http://127.0.0.1:1", "openai_api_key": "none", "openai_model": MODEL},
            ),
        }
        self._servers = [
            await _serve(_nemo_app(kind, name, self._ports[name], more, client), self._ports[name])
            for name, (kind, more) in settings.items()
        ]
        self._post = servers.request

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._rows.read_text().splitlines() if line.strip()]
        return [
            {"prompt": _text(row["responses_create_params"]["input"]), "task": row}
            for row in rows[first : first + count]
        ]

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        params = {**task["responses_create_params"], "metadata": {"url": endpoint.url, "key": endpoint.key}}
        url = f"http://127.0.0.1:{self._ports['agent']}/run"
        try:
            answer = await self._post("POST", url, json={**task, "responses_create_params": params})
            said = await answer.read()
            refused = endpoint.key in self._refused
        finally:
            self._refused.discard(endpoint.key)
        if answer.status != 200:
            text = f"/run answered with HTTP {answer.status}: {said.decode(errors='replace')[:1000]}"
            raise Refused(text) if refused else RuntimeError(text)
        result = json.loads(said)
        left_out = {"responses_create_params", "response", "reward", *task}
        return {"reward": result["reward"], "info": {k: v for k, v in result.items() if k not in left_out}}

    async def stop(self) -> None:
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*(server.task for server in self._servers), return_exceptions=True)


def _keyed_model_server() -> tuple[Any, set[str]]:
    """Returns NeMo-Gym's model server for OpenAI endpoints, with the endpoint and the key that each request names in
    its metadata; and the keys of which a request was answered with HTTP 400.
    """
    base = importlib.import_module("responses_api_models.openai_model.app").SimpleModelServer
    openai_utils = importlib.import_module("nemo_gym.openai_utils")
    from_body = importlib.import_module("fastapi").Body()
    refused: set[str] = set()

    async def responses(self: Any, body: Any = from_body) -> Any:
        given = body.model_dump(exclude_unset=True)
        where = given.pop("metadata")
        client = openai_utils.NeMoGymAsyncOpenAI(base_url=f"{where['url']}/v1", api_key=where["key"])
        try:
            answer = await client.create_response(**{**given, "model": MODEL})
        except Exception as error:
            if getattr(error, "status", None) == 400:
                refused.add(where["key"])
            raise
        return openai_utils.NeMoGymResponse.model_validate(answer)

    responses.__annotations__["body"] = openai_utils.NeMoGymResponseCreateParamsNonStreaming
    return type("KeyedModelServer", (base,), {"responses": responses, "__module__": __name__}), refused


def _nemo_app(kind: Any, name: str, port: int, more: dict[str, Any], client: Any) -> Any:
    """Returns the web application of one of NeMo-Gym's servers."""
    config = kind.model_fields["config"].annotation
    own = {"name": name, "host": "127.0.0.1", "port": port, "entrypoint": "app.py"}
    server = kind(config=config(**{**own, **more}), server_client=client)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    return app


class TextArena(Kind):
    """`config`: `game` (the id of a game for one player), `max_turns`, and the game's own settings under `settings`."""

    package = "textarena"

    async def start(self) -> None:
        self._arena = importlib.import_module("textarena")
        self._begin({"seed": 0})

    def _begin(self, task: dict[str, Any]) -> Any:
        """Returns the game with a seed. The games use Python's global generator, so nothing may run in between."""
        game = self._arena.make(env_id=self.config["game"], **self.config.get("settings", {}))
        random.seed(task["seed"])
        game.reset(num_players=1, seed=task["seed"])
        return game

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"prompt": f"{self.config['game']}, seed {seed}", "task": {"seed": seed}}
            for seed in range(first, first + count)
        ]

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        game, messages, before = self._begin(task), [], ""
        done, turns = False, 0
        while not done and turns < self.config.get("max_turns", 64):
            _, seen = game.get_observation()
            text, before = str(seen).removeprefix(before), str(seen)
            messages.append({"role": "user", "content": text.strip()})
            try:
                said = await endpoint.say(messages)
            except Refused:
                break
            messages.append({"role": "assistant", "content": said})
            done, _ = game.step(action=said)
            turns += 1
        rewards, info = game.close() if done else ({}, {})
        end = (info or {}).get(0, {}).get("reason", "limit")
        return {"reward": float((rewards or {}).get(0, 0.0)), "info": {"end": str(end), "turns": turns}}


class ReasoningGym(Kind):
    """`config`: `dataset`, `seed`, `size`, `system`, and the dataset's own settings under `settings`."""

    package = "reasoning-gym"

    async def start(self) -> None:
        gym = importlib.import_module("reasoning_gym")
        self._extract = importlib.import_module("reasoning_gym.utils").extract_answer
        more = {"seed": self.config.get("seed", 0), "size": self.config.get("size", 1000)}
        self._data = gym.create_dataset(self.config["dataset"], **more, **self.config.get("settings", {}))

    async def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        end = min(first + count, len(self._data))
        return [{"prompt": self._data[n]["question"], "task": {"number": n}} for n in range(first, end)]

    async def play(self, task: Any, endpoint: Endpoint) -> dict[str, Any]:
        entry = self._data[task["number"]]
        system = self.config.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": entry["question"]})
        try:
            said = await endpoint.say(messages)
        except Refused:
            said = ""
        answer = self._extract(said) or said.strip()
        return {"reward": float(self._data.score_answer(answer, entry)), "info": {"answer": answer}}


KINDS: dict[str, type[Kind]] = {
    "verifiers": Verifiers,
    "openenv": OpenEnv,
    "nemo_gym": NeMoGym,
    "textarena": TextArena,
    "reasoning_gym": ReasoningGym,
}


def _text(prompt: Any) -> str:
    """Returns the text of a prompt: a string, or a list of messages as objects or dicts."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    parts = [one.get("content") if isinstance(one, dict) else getattr(one, "content", "") for one in prompt]
    return "\n\n".join(part if isinstance(part, str) else json.dumps(part, default=str) for part in parts)


def _action(said: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the action in a message: a JSON object, or the value of the schema's only required field."""
    text = said.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    required = schema.get("required", [])
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value if set(required) <= set(value) else None
    if len(required) != 1:
        return None
    kind = schema.get("properties", {}).get(required[0], {}).get("type")
    try:
        return {required[0]: {"integer": int, "number": float}.get(kind, str)(text)}
    except ValueError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _serve(app: Any, port: int) -> Any:
    """Serves a web application on this event loop, on loopback. Returns the server once it listens."""
    uvicorn = importlib.import_module("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    task = asyncio.create_task(server._serve())  # `serve` would also take this process's signals
    for _ in range(int(START_S * 20)):
        if server.started:
            server.task = task
            return server
        if task.done():
            break
        await asyncio.sleep(0.05)
    raise TimeoutError(f"a server on port {port} did not start within {START_S:.0f} s")


class Runner:
    def __init__(self, kind: Kind, answers: int) -> None:
        self._kind, self._answers = kind, answers
        self._threads = ThreadPoolExecutor(MOST_EPISODES)
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        lines = await _lines()
        try:
            await self._kind.start()
        except Exception as error:
            self._answer({"error": _told(error)})
            return
        self._answer({"ready": {"version": importlib.metadata.version(self._kind.package), "python": sys.version}})
        while line := await lines.readline():
            request = json.loads(line)
            if request["call"] == "cancel":
                if call := self._calls.get(request["target"]):
                    call.cancel()
                continue
            self._calls[request["id"]] = asyncio.create_task(self._call(request))
        await self._kind.stop()

    async def _call(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            value: Any
            if request["call"] == "tasks":
                value = await self._kind.tasks(request["first"], request["count"])
            else:
                endpoint = Endpoint(request["url"], request["key"], self._threads)
                value = await self._kind.play(request["task"], endpoint)
                if not math.isfinite(value["reward"]):
                    raise ValueError(f"the environment's reward is {value['reward']}")
            self._answer({"id": number, "value": value})
        except asyncio.CancelledError:
            self._answer({"id": number, "error": {"message": "cancelled", "refused": False}})
        except Exception as error:
            self._answer({"id": number, "error": _told(error)})
        finally:
            del self._calls[number]

    def _answer(self, value: dict[str, Any]) -> None:
        data = memoryview(json.dumps(value, default=str).encode() + b"\n")
        while data:
            data = data[os.write(self._answers, data) :]


def _told(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    message = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return {"message": message, "refused": isinstance(error, Refused)}


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(answers, False)
    first = b""
    while not first.endswith(b"\n"):  # unbuffered, so that what follows is left to the event loop
        byte = os.read(0, 1)
        if not byte:
            return
        first += byte
    runner = Runner(KINDS[sys.argv[1]](json.loads(first)["config"]), answers)
    try:
        asyncio.run(runner.run())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(0) == os.getpid():
                os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
