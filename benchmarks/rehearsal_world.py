"""The simulated half of `benchmarks.rehearsal`: hosts, training ranks and engines, hundreds of them in three processes.

What the driver would reach through Ray as a process of its own (`TrainActor`, `EngineActor`, `HostActor`) is an object
in a `World` here, which is a real Ray actor. So the driver makes the same calls as in a real run, and Ray carries
them: `Simulated` stands in for the class of an actor, `Handle` for its handle.

    a rank      answers at once. Rank 0, in a process of its own, runs the real weight sync (`slime.weights.sync`) with
                the real transport and real HTTP to every engine, except that no group is formed and no byte is
                broadcast. The first rank of each host fetches the batch, the others do not unpack it.
    an engine   an HTTP server at the address of its host that answers the routes of the client, the weight sync and the
                router. Its digests are those of the trainer's tensors.
    a host      an address of 127.0.0.0/8. It reads the shared folders as a real one does. If it dies, everything on it
                stops responding, and Ray no longer lists it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import orjson
import ray

from slime.cluster.engine_tracker import OWN_TIME, WEIGHT_VERSION, EngineInfo
from slime.cluster.hang_doctor import Look
from slime.cluster.host_actor import HostFacts
from slime.cluster.hosts import not_seen, versions_here
from slime.core.engine_interface import STREAM
from slime.core.errors import EngineError
from slime.core.topology import EngineLayout
from slime.observability.stacks import Standing

NUM_LAYERS = 36
"""Layers of the model whose weights are sent; its other sizes are tiny."""
RESPONSE_S = 1.0
"""Seconds that an engine takes for a response."""
START_S = 0.3
"""Seconds that an engine takes to start."""
FIRST_TOKEN = 10


# --- The driver's side


class Handle:
    """Handle of a simulated actor: each method has `remote`, as with Ray."""

    calls: ClassVar[Counter[str]] = Counter()
    """Method -> number of calls so far, over all handles of this process."""

    def __init__(self, world: Any, key: str, *, fetches: bool = True) -> None:
        self._world, self.key, self._fetches = world, key, fetches
        self._actor_id = SimpleNamespace(hex=lambda: key)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            Handle.calls[method] += 1
            if method == "train" and not self._fetches:
                arguments = ([*arguments],)  # Ray does not fetch what is in a list
            return self._world.call.remote(self.key, method, *arguments)

        return SimpleNamespace(remote=remote)


class Simulated:
    """Stands in for the class of an actor. `place` says where an actor with these options runs."""

    def __init__(
        self, kind: str, world: Any, place: Callable[[dict[str, Any]], tuple[str, bool]], *, first: Any = None
    ) -> None:
        """`first`: the `World` of the first actor, if it has one of its own."""
        self._kind, self._world, self._place, self._num = kind, world, place, 0
        self._first = first or world

    def options(self, **options: Any) -> Any:
        host, fetches = self._place(options)

        def remote(*arguments: Any, **named: Any) -> Handle:
            Handle.calls[f"create {self._kind}"] += 1
            world = self._world if self._num else self._first
            key, self._num = f"{self._kind}-{self._num}", self._num + 1
            world.create.remote(key, host, named, *arguments)
            return Handle(world, key, fetches=fetches)

        return SimpleNamespace(remote=remote)


# --- In the processes of the world


class Rank:
    """A training rank without a model."""

    def __init__(self, world: World, host: str, args: Any, rank: int, slots: Sequence[int], *rest: Any) -> None:
        self._args, self._rank, self._size, self._host = args, rank, len(slots), host
        self._standing = Standing(f"training rank {rank}", host, os.getpid())
        self._version = 1
        self._given_up: set[tuple[str, int]] = set()
        self._sender: Sender | None = None

    def free_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def build(self, host: str, port: int) -> dict[str, float]:
        return {"import": 0.0, "build": 0.0, "rehearsal": 0.0}

    def connect_engines(self) -> None:
        if self._rank == 0:
            self._sender = Sender(self._args, self._size)

    async def sync_weights(self, engines: Sequence[EngineInfo], mode: str, for_eval: bool = False) -> dict[str, float]:
        if self._sender is None:
            return {}
        told = await asyncio.to_thread(self._sender.send, engines, mode, self._version, self._given_up)
        return {**told, WEIGHT_VERSION: float(self._version)}

    def give_up(self, url: str, incarnation: int) -> None:
        self._given_up.add((url, incarnation))

    def look(self, deep: bool = False) -> Look:
        return Look(self._standing, 0.0, 0)

    def train(self, batch: Any) -> dict[str, float]:
        self._version += 1
        metrics = {f"train/metric_{i}": 0.0 for i in range(60)} if self._rank == 0 else {}
        return {**metrics, OWN_TIME: 1.0}

    def memory_plan(self) -> None:
        return None

    def stop(self) -> None:
        if self._sender is not None:
            self._sender.close()


class Sender:
    """The weight sync of rank 0. Without the broadcast itself, which needs NCCL and one process per engine rank."""

    def __init__(self, args: Any, num_ranks: int) -> None:
        import torch.distributed as dist

        from slime.weights.transports import TRANSPORTS, distributed
        from tests.support.weights import Whole, transport_context

        double: Any = distributed
        double._have_come, double.join_group = (lambda *_: True), (lambda *_: object())
        done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
        nothing: Any = dist
        nothing.broadcast, nothing.destroy_process_group = (lambda *_, **__: done), (lambda *_: None)
        self._args, self._num_ranks = args, num_ranks
        table, state = weights()
        self._outgoing = Whole(table, state.items())
        self._channel = TRANSPORTS.build("distributed", args).open(transport_context(table=table))
        self._known: dict[tuple[str, int], Any] = {}

    def send(self, engines: Sequence[EngineInfo], mode: str, version: int, given_up: set[Any]) -> dict[str, float]:
        """Returns metrics as a real rank 0 does, and the processor seconds of this process meanwhile."""
        from slime.serving.control import HttpEngineControl
        from slime.serving.payloads import digest
        from slime.weights.receivers import Peers, Receiver
        from slime.weights.sync import _RankReport, sync_weights

        began_s = time.process_time()

        def receiver(info: EngineInfo) -> Receiver:
            limit_s = self._args.weight_sync_timeout_s
            control = HttpEngineControl(info.url, info.layout, limit_s, info.control_key)
            return Receiver(control, (), lambda: (info.url, info.incarnation) in given_up)

        keys = [(info.url, info.incarnation) for info in engines]
        known = self._known
        self._known = {key: known.get(key) or receiver(info) for key, info in zip(keys, engines, strict=True)}
        others = [_RankReport(None)] * (self._num_ranks - 1)
        metrics = sync_weights(
            self._outgoing,
            receivers=list(self._known.values()),
            channel=self._channel,
            digest=digest,
            version=version,
            buffer_bytes=2**20,
            peers=Peers(gather=lambda own: [own, *others]),
            pause_mode=mode,
        )
        metrics |= {**self._channel.costs(), "sync_cpu": time.process_time() - began_s}
        return {f"perf/{name}": value for name, value in metrics.items()}

    def close(self) -> None:
        self._channel.close()


def weights() -> tuple[Any, Any]:
    """Returns the weight map and the tensors that are sent."""
    from tests.support.weights import model

    return model(num_hidden_layers=NUM_LAYERS)


def checksums(layout: EngineLayout) -> bytes:
    """Returns the answer of an engine with this layout to `/weights_checker`."""
    from slime.serving.payloads import digest
    from tests.support.weights import engine_tensors

    table, state = weights()
    sizes = {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "dp_size": layout.dp_size}
    ranks = [
        {
            "parallelism_info": {"pp_rank": rank.pp_rank, "tp_rank": rank.tp_rank, **sizes},
            "checksums": {
                name: digest(tensor)
                for name, tensor in engine_tensors(table, state, layout=layout, rank=rank, on_cpu=True)
            },
        }
        for rank in layout.ranks()
    ]
    return orjson.dumps({"ranks": ranks})


class Host:
    """A host other than the driver's."""

    def __init__(self, world: World, host: str) -> None:
        self._name, self._end = host, asyncio.Event()

    def facts(self) -> HostFacts:
        return HostFacts(self._name, 64, versions())

    async def not_seen(self, contract: Any) -> list[str]:
        return await asyncio.to_thread(not_seen, contract)

    def guard(self, log_dir: str) -> None:
        pass

    async def take_up(self, contract: Any, log_dir: str) -> list[str]:
        return await self.not_seen(contract)

    async def watching(self) -> None:
        await self._end.wait()

    def stopped(self) -> list[Any]:
        return []

    def examine(self, responding: Sequence[str]) -> tuple[list[Any], str]:
        return [], ""

    def close(self) -> None:
        self._end.set()

    die = close


_versions: dict[str, str] = {}


def versions() -> dict[str, str]:
    """Returns `versions_here`, computed once for all hosts of this process."""
    if not _versions:
        _versions.update(versions_here())
    return _versions


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection to an engine, with one request at a time."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine, self._rest, self._rid = engine, bytearray(), ""
        self._timer: asyncio.TimerHandle | None = None
        self._num_prompt, self._num_new = 0, 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._engine.connections.add(self)

    def connection_lost(self, problem: Exception | None) -> None:
        self._engine.connections.discard(self)
        self._drop()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while True:
            head, mark, rest = self._rest.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if not mark or len(rest) < length:
                return
            self._rest = rest[length:]
            route = bytes(head.split(b" ", 2)[1]).partition(b"?")[0].decode()
            self._engine.asked[route] += 1
            if route == "/generate":
                self._generate(orjson.loads(rest[:length]))
            else:
                self._answer(self._engine.answer(route, bytes(rest[:length])))

    def abort(self) -> None:
        """Ends the response as SGLang ends an aborted request."""
        if self._timer is not None:
            self._event(1, {"type": "abort", "message": "Aborted"})

    def _generate(self, body: dict[str, Any]) -> None:
        self._rid, self._num_prompt = body["rid"], len(body["input_ids"])
        self._num_new = body["sampling_params"]["max_new_tokens"]
        self._engine.running[self._rid] = self
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        finish = {"type": "length", "length": self._num_new}
        self._timer = asyncio.get_running_loop().call_later(RESPONSE_S, self._event, self._num_new, finish)

    def _event(self, num: int, finish: dict[str, Any]) -> None:
        ids = [FIRST_TOKEN + i % 50 for i in range(num)]
        meta = {
            "finish_reason": finish,
            "weight_version": self._engine.version,
            "prompt_tokens": self._num_prompt,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        event = b"data: " + orjson.dumps({"text": "x" * num, "output_ids": ids, "meta_info": meta}) + b"\n\n"
        self.transport.write(b"%x\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % (len(event), event))
        self._drop()

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)

    def _drop(self) -> None:
        self._engine.running.pop(self._rid, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SimulatedEngine:
    """An engine's actor and its server."""

    def __init__(self, world: World, host: str, name: str, spec: Any, *rest: Any, **named: Any) -> None:
        self._world, self._host, self._spec = world, host, spec
        self.asked, self.version = world.asked, "0"
        self.connections: set[Connection] = set()
        self.running: dict[str, Connection] = {}
        self._server: asyncio.Server | None = None
        self.url, self._is_dead = "", False

    async def wait_ready(self, timeout_s: float) -> str:
        await asyncio.sleep(START_S)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), self._host, 0, backlog=1024)
        self.url = f"http://{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    def problem(self, expects_answers: bool) -> str | None:
        return "its server has exited" if self._is_dead else None

    def stop(self) -> None:
        self.die()

    def die(self) -> None:
        """The server exits, with all connections."""
        self._is_dead = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    def answer(self, route: str, body: bytes) -> bytes:
        """Returns the response to a request other than `/generate`."""
        if route == "/weights_checker":
            return self._world.checksums(self._spec.layout)
        if route == "/init_weights_update_group":
            return orjson.dumps({"success": True, "message": STREAM})
        if route == "/update_weights_from_distributed":
            self.version = orjson.loads(body)["weight_version"]
        if route == "/abort_request":
            asked = orjson.loads(body)
            for rid, one in list(self.running.items()):
                if asked.get("abort_all") or rid.startswith(asked["rid"]):
                    one.abort()
        if route in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            return orjson.dumps({"model_path": "simulated", "served_model_name": "simulated", "tp_size": 1})
        return b'{"success": true}'


KINDS = {"rank": Rank, "engine": SimulatedEngine, "host": Host}


@dataclass(slots=True)
class _Actor:
    host: str
    held: Any


@ray.remote(num_cpus=0, max_concurrency=20_000)
class World:
    """Holds simulated actors in one process."""

    def __init__(self) -> None:
        from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely

        logging.disable(logging.WARNING)
        allow_many_connections()
        self._actors: dict[str, _Actor] = {}
        self._awaited: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set once an actor is created, because Ray may start a call before the one that creates its actor."""
        self._checksums: dict[Any, bytes] = {}
        self.asked: Counter[str] = Counter()
        """Route -> number of requests to engines."""
        collect_garbage_rarely()

    def checksums(self, layout: EngineLayout) -> bytes:
        if layout not in self._checksums:
            self._checksums[layout] = checksums(layout)
        return self._checksums[layout]

    async def create(self, key: str, host: str, named: dict[str, Any], *arguments: Any) -> None:
        try:
            self._actors[key] = _Actor(host, KINDS[key.split("-")[0]](self, host, *arguments, **named))
        finally:
            self._awaited[key].set()

    async def call(self, key: str, method: str, *arguments: Any) -> Any:
        await self._awaited[key].wait()
        actor = self._actors.get(key)
        if actor is None:
            raise EngineError(f"{key} is gone")
        found = getattr(actor.held, method)(*arguments)
        return await found if asyncio.iscoroutine(found) else found

    async def kill(self, key: str) -> None:
        """Kills an actor."""
        await self._awaited[key].wait()
        actor = self._actors.pop(key, None)
        if actor is not None and hasattr(actor.held, "die"):
            actor.held.die()

    async def lose_engine(self, url: str) -> None:
        """The server at this address exits."""
        for actor in self._actors.values():
            if isinstance(actor.held, SimulatedEngine) and actor.held.url == url:
                actor.held.die()

    async def lose_host(self, host: str) -> None:
        for key in [key for key, actor in self._actors.items() if actor.host == host]:
            await self.kill(key)

    async def take_asked(self) -> dict[str, int]:
        """Returns the number of requests to engines by route since the last call."""
        asked = dict(self.asked)
        self.asked.clear()
        return asked
