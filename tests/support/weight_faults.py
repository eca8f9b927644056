"""Faults on the way from a trainer to a real engine, and the law that each of them has to obey.

A fault strikes where the sender has taken its digests: one bit of a filled bucket is flipped, two tensors of one shape
change places, or the engine says that an update went well of which nothing reached its model. A proxy in front of the
engine does the last one; everything else on the way is what a run has.

The law of a case: the weight sync fails with the names of exactly the tensors that the engine then holds wrongly;
requests that came meanwhile, and after it, get no token; the next weight sync is verified, and they are answered by its
weights, under its version.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import torch
from aiohttp import web

from slime.core.engine_interface import STREAM, TOKEN_VERSIONS_KEY
from slime.core.errors import WeightSyncError
from slime.core.topology import ONE_RANK
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest
from slime.weights.receivers import Receiver
from slime.weights.send_plan import Bucket, Outgoing
from slime.weights.sync import Difference, describe, sync_weights
from slime.weights.transports import TRANSPORTS, Channel
from tests.support.forwarding import between, forward
from tests.support.weight_agents import agent_beside, delta_channel
from tests.support.weights import TamperingChannel, disk_settings, transport_context

PROMPT = [2, 40, 41, 42, 43, 44, 45, 46]
TRANSPORTS_TRIED = ("disk", "distributed", "tensor", "delta")
FAULTS = ("flip", "swap", "nothing")
UNKNOWN = "rotary_emb.inv_freq"
"""SGLang's models pass over tensors that are called so."""
DENSITY, STEP = 0.03, 0.05
Strike = Callable[[Bucket], None]


@dataclass
class ForgettingProxy:
    """An engine at another address, which says of some updates that they went well, and has not made them.

    A broadcast is received all the same, if it `receives`: the engine gets it under names that its model does not have.
    """

    target: str
    url: str = ""
    to_forget: Container[int] = ()
    """Numbers of buckets, from 0, counted since it was set."""
    updates: int = 0
    receives: bool = True
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key of a `stream_format` -> the call that listed the tensors."""
    known: set[str] = field(default_factory=set)
    """Keys that the engine has."""

    def forget(self, numbers: Container[int]) -> None:
        """Of the updates that come now."""
        self.to_forget, self.updates = numbers, 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith("/update_weights_from_"):
            return await forward(request, self.target)
        body = self._listed(await request.json())
        buckets = _buckets(body)
        first, self.updates = self.updates, self.updates + len(buckets)
        forgotten = [first + number in self.to_forget for number in range(len(buckets))]
        if not any(forgotten):
            self.known.add(_key(body))
            return await forward(request, self.target, body=json.dumps(body).encode())
        if not (self.receives and request.path.endswith("_distributed")):
            return web.json_response({"success": True, "message": "Succeeded to update model weights."})
        kept = [not of_bucket for of_bucket, size in zip(forgotten, buckets, strict=True) for _ in range(size)]
        body["names"] = [
            n if keep else f"{UNKNOWN}.{i}" for i, (n, keep) in enumerate(zip(body["names"], kept, strict=True))
        ]
        if _key(body):  # the engine is to keep the right names under the key
            body["load_format"] = body["load_format"].replace(_key(body), UNKNOWN)
        return await forward(request, self.target, body=json.dumps(body).encode())

    def _listed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The call, with its list of tensors if the engine has not got it, or gets another one."""
        key = _key(body)
        if body.get("names"):
            self.lists[key] = body
        elif key and (self.to_forget or key not in self.known):
            body = {**self.lists[key], "weight_version": body["weight_version"]}
        return dict(body)


def _key(body: Mapping[str, Any]) -> str:
    """The key of a `stream_format`, or an empty text."""
    load_format = str(body.get("load_format"))
    return load_format.split(":")[1] if load_format.startswith(STREAM) else ""


def _buckets(body: Mapping[str, Any]) -> list[int]:
    """The number of tensors in each bucket of an update."""
    load_format = str(body.get("load_format"))
    numbers = load_format.split(":")[2:] if load_format.startswith(STREAM) else []
    return [int(number) for number in ",".join(numbers).split(",") if number] or [len(body.get("names", ()))]


class StruckChannel(TamperingChannel):
    """Strikes filled buckets where they lie, and says when the first one is on its way."""

    def __init__(self, inner: Channel, strike: Strike, on_way: Callable[[], None]) -> None:
        super().__init__(inner, lambda _, tensor: tensor)
        self._strike, self._on_way = strike, on_way
        self._started = False

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        self._strike(bucket)
        return self._inner.prepare(bucket, receivers)

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        if not self._started:
            self._started = True
            self._on_way()
        super().deliver(prepared, receivers, version=version)


def moved(state: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Other weights: some elements of every tensor, at least one, are others."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in state.items():
        chosen = torch.rand(tensor.shape, generator=generator) < DENSITY
        chosen.view(-1)[seed % chosen.numel()] = True
        moves = STEP * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        out[name] = torch.where(chosen, tensor + moves, tensor)
    return out


@dataclass(frozen=True)
class Answer:
    """Of an engine to one request."""

    log_probs: torch.Tensor
    """[T-1] of the prompt."""
    versions: tuple[int, ...]
    """Of its tokens."""


@dataclass
class Count:
    """What became of the cases."""

    cases: int = 0
    caught: int = 0
    """Failed with the names of exactly the tensors that were wrong."""
    tokens_served: int = 0
    """To requests that came between the fault and the good weight sync, by any other weights."""
    answered: int = 0
    """Requests of that time that the good weights answered."""


@dataclass
class Engine:
    """A real engine behind a proxy, weights that it may get, and what it answers with each."""

    url: str
    """Of the server itself, which requests go to."""
    proxy: ForgettingProxy
    path: Path
    folder: Path
    outgoing: Sequence[Outgoing]
    """Weights, all tensors different from each other."""
    sent: Sequence[Mapping[str, torch.Tensor]]
    """The same, as they travel: HF name -> tensor."""
    answers: list[torch.Tensor]
    """[T-1] log-probs of the prompt for each."""
    bucket_bytes: int = 64 * 1024
    gpus: tuple[str, ...] = ()
    """UUIDs of the sender's GPU and of the engine's. Empty: both are on a CPU."""
    version: int = 1
    at: int = 0
    """Which of the weights it has."""
    channels: dict[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = self.outgoing[0].table
        self.control = HttpEngineControl(self.proxy.url, ONE_RANK, timeout_s=60)
        self.receivers = [Receiver(self.control, self.gpus[1:])]
        self.pool = ThreadPoolExecutor(2)
        self.turns = self.outgoing[0].turns(self.bucket_bytes)

    def close(self) -> None:
        """Ends channels and connections."""
        self.pool.shutdown()
        for channel in self.channels.values():
            channel.close()
        self.control.close()

    def channel(self, transport: str, timeout_s: float = 60.0) -> Channel:
        """Of a transport, opened once: it lives through all faults."""
        if transport not in self.channels:
            if transport == "delta":
                folders = self.folder / "shared", self.folder / "local"
                folders[0].mkdir()
                made = delta_channel(*folders, table=self.table, hf_checkpoint=self.path)
            else:
                device, gpu = ("cuda", self.gpus[0]) if self.gpus else ("cpu", None)
                context = transport_context(
                    hf_checkpoint=self.path, table=self.table, timeout_s=timeout_s, device=device, gpu_id=gpu
                )
                made = TRANSPORTS.build(transport, disk_settings(self.folder / "disk")).open(context)
            self.channels[transport] = made
        return self.channels[transport]

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        """Beside the engine, for the block: deltas need one."""
        self.channel("delta")
        with agent_beside(self.control, self.folder / "shared", self.folder / "local"):
            yield

    def sync(self, which: int, channel: Channel) -> None:
        """Sends these weights as the next version."""
        self.version += 1
        sync_weights(
            self.outgoing[which],
            receivers=self.receivers,
            channel=channel,
            digest=digest,
            version=self.version,
            buffer_bytes=self.bucket_bytes,
        )
        self.at = which

    def ask(self) -> Answer:
        """One request, which waits as long as the engine is paused."""
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = httpx.post(f"{self.url}/generate", json=body, timeout=120).raise_for_status().json()["meta_info"]
        log_probs = torch.tensor([x[0] for x in meta["input_token_logprobs"][1:]])
        return Answer(log_probs, tuple(meta[TOKEN_VERSIONS_KEY]))

    def is_answered_by(self, answer: Answer) -> int:
        """Which of the weights an answer is of: those that it is nearest to."""
        gaps = [float((answer.log_probs - own).abs().max()) for own in self.answers]
        return gaps.index(min(gaps))

    # --- faults -------------------------------------------------------------------------------------------------------

    def one_case(self, transport: str, fault: str, draw: Random, count: Count) -> None:
        """A weight sync with a fault, then a good one. Raises `AssertionError` where the law is broken."""
        count.cases += 1
        inner = self.channel(transport)
        if transport == "delta" and draw.random() < 0.3:
            inner.abandon()  # what is then sent is whole
        bad, good = draw.sample([i for i in range(len(self.outgoing)) if i != self.at], 2)
        strike, wrong = self._fault(fault, bad, draw, whole=transport in ("disk", "delta"))
        asked: list[Future[Answer]] = []
        struck = StruckChannel(inner, strike, lambda: asked.append(self.pool.submit(self.ask)))
        message = ""
        try:
            self.sync(bad, struck)
        except WeightSyncError as error:
            message = str(error)
        self.proxy.to_forget = ()
        assert message, f"{fault} by {transport} of {sorted(wrong)} was not caught"
        assert f"{self.proxy.url} rank 0: {self._described(wrong)}. The engines" in message, message
        count.caught += 1
        asked.append(self.pool.submit(self.ask))
        early = [future for future in asked if future.done()]
        count.tokens_served += sum(len(future.result().versions) for future in early)
        assert not early, "answered while nobody has verified the weights"
        self.sync(good, inner)
        for future in asked:
            answer = future.result()
            others = [version for version in answer.versions if version != self.version]
            count.tokens_served += len(others)
            assert not others, f"tokens of versions {answer.versions}, verified is {self.version}"
            assert self.is_answered_by(answer) == good
            count.answered += 1

    def _described(self, wrong: Container[str]) -> str:
        names = tuple(sorted(name for name in self.table.resident if name in wrong))
        return describe(self.table, Difference((), (), names, len(self.table.resident) - len(names)))

    def _fault(self, fault: str, bad: int, draw: Random, *, whole: bool) -> tuple[Strike, set[str]]:
        """What happens to filled buckets, and the resident tensors that the engine then holds wrongly."""
        sent = self.sent[bad]
        names = sorted(sent)
        if fault == "nothing":
            number = draw.randrange(len(self.turns))
            everything = whole or draw.random() < 0.5
            self.proxy.forget(range(10**6) if everything else [number])
            return lambda bucket: None, self._holding(names if everything else self.turns[number].hf_names)
        if fault == "flip":
            name = draw.choice(names)
            bit = draw.randrange(sent[name].nbytes * 8)
            return _on(name, lambda tensor: _flip(tensor, bit)), self._holding([name])
        alike = defaultdict(list)
        for name in names:
            alike[tuple(sent[name].shape), sent[name].dtype].append(name)
        first = draw.choice([n for own in alike.values() if len(own) > 1 for n in own])
        second = draw.choice([n for n in alike[tuple(sent[first].shape), sent[first].dtype] if n != first])
        strikes = [
            _on(n, lambda tensor, o=other: tensor.copy_(sent[o])) for n, other in ((first, second), (second, first))
        ]

        def swap(bucket: Bucket) -> None:
            for strike in strikes:
                strike(bucket)

        return swap, self._holding([first, second])

    def _holding(self, names: Sequence[str]) -> set[str]:
        """The resident tensors that hold any of these."""
        wanted = set(names)
        return {own for own, held in self.table.resident.items() if any(wanted.intersection(e.hf) for e in held)}


def _on(name: str, change: Callable[[torch.Tensor], object]) -> Strike:
    def strike(bucket: Bucket) -> None:
        for own, tensor in bucket.tensors:
            if own == name:
                change(tensor)

    return strike


def _flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def try_faults(engine: Engine, transport: str, fault: str, cases: int) -> Count:
    """So many random cases, the same ones each time."""
    draw, count = Random(f"{transport} {fault}"), Count()
    for _ in range(cases):
        engine.one_case(transport, fault, draw, count)
    return count


@contextlib.contextmanager
def behind_proxy(url: str) -> Iterator[ForgettingProxy]:
    """The engine at `url` at another address, for the block."""
    proxy = ForgettingProxy(url)
    with between(proxy):
        yield proxy
