"""Agents of smolagents, LangGraph and OpenAI's Agents SDK from the package index on a real engine: a loop of three
turns with a tool, in which every trained id is one that the engine sampled.

A model with random weights calls no tool by itself, so the engine samples each turn under a regular expression.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from slime.agent.adapters import AgentAdapter
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import EngineClient
from tests.support import framework_agents
from tests.support.command_lines import AGENTS
from tests.support.engine_state import relabel
from tests.support.engines import serving, spec_of
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = {
    "smolagents": ("smolagents[openai]==1.26.0",),
    "langgraph": ("langgraph==1.2.24", "langchain-openai==1.7.4"),
    "openai-agents": ("openai-agents==0.24.0",),
}
TEMPLATE = (
    "{{ '<bos>' }}{% if tools %}{{ '<|user|>' ~ (tools | tojson) ~ '<eos>' }}{% endif %}{% for m in messages %}"
    "{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') ~ (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' ~ (c.function | tojson) ~ '\\n</tool_call>' }}{% endfor %}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,6}"\}\}\n</tool_call>'
DONE = r'<tool_call>\n\{"name": "final_answer", "arguments": \{"answer": "[A-Z][a-z]{2,6}"\}\}\n</tool_call>'
CODE = r'Thought: I look\n<code>\nprint\(weather\("[A-Z][a-z]{2,6}"\)\)\n</code>'
LAST = r'<code>\nfinal_answer\("[A-Z][a-z]{2,6}"\)\n</code>'
TURNS = {"smolagents_tools": (CALL, CALL, DONE), "smolagents_code": (CODE, CODE, LAST)}
PLAIN = (CALL, CALL, "It is [a-z]{3,8}")
LIMIT_S = 300.0


def python_with(name: str) -> Path:
    """The python of a virtual environment with a framework, made once. Skips the test where pip cannot fetch it."""
    folder = AGENTS / name
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(folder / "bin" / "pip"), "install", "-q", *PACKAGES[name]]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"pip cannot install {name}: {found.stderr[-300:]}")
        (folder / "done").touch()
    return folder / "bin" / "python"


class Guided:
    """The client of an engine that samples each turn under the next regular expression."""

    def __init__(self, client: EngineClient, turns: Sequence[str]) -> None:
        self._client, self._turns = client, iter(turns)
        self.sampled: list[Generation] = []

    async def stream(self, ids: Sequence[int], params: Any, **more: Any) -> AsyncGenerator[Generation, None]:
        guided = {**params, "regex": next(self._turns)}
        async with aclosing(self._client.stream(ids, guided, **more)) as parts:
            async for part in parts:
                self.sampled.append(part)
                yield part


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with room for the prompts of smolagents, which have thousands of characters."""
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32768)
    with serving(spec_of(path), tmp_path_factory.mktemp("engine")) as server:
        relabel(server.url, 1)
        yield server


@pytest.mark.parametrize(
    ("agent", "package"),
    [
        ("smolagents_code", "smolagents"),
        ("smolagents_tools", "smolagents"),
        ("langgraph", "langgraph"),
        ("openai_agents_chat", "openai-agents"),
        ("openai_agents_responses", "openai-agents"),
        ("openai_agents_stream", "openai-agents"),
    ],
)
def test_a_framework_loops_over_a_tool_and_every_trained_id_was_sampled(agent: str, package: str, engine: Any) -> None:
    python = python_with(package)
    tokenizer = AutoTokenizer.from_pretrained(engine.model_path)
    tokenizer.chat_template = TEMPLATE
    chat = ChatRenderer(tokenizer)
    params = {"temperature": 1.0, "max_new_tokens": 200, "skip_special_tokens": False}

    async def run() -> tuple[list[Sample], dict[str, int], list[Generation]]:
        client = EngineClient(engine.url, request_timeout_s=120)
        guided = Guided(client, TURNS.get(agent, PLAIN))
        adapter = AgentAdapter(
            guided,
            ConversationTemplate(chat, [tokenizer.eos_token_id]),
            decode=chat.decode,
            tool_format="hermes",
            sampling=params,
        )
        url = await adapter.start()
        try:
            key = adapter.open_session()
            command = [str(python), framework_agents.__file__, agent, url, key]
            process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=asyncio.subprocess.STDOUT)
            out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
            assert process.returncode == 0 and b"ENDED: " in out, out.decode()
            forks = dict(adapter.session(key).forks)
            return adapter.finish_session(key, Sample(index=0, group_index=0), reward=1.0), forks, guided.sampled
        finally:
            await adapter.close()
            await client.close()

    samples, forks, sampled = asyncio.run(run())
    # smolagents writes what its model called as text, so each turn with a call is another conversation.
    assert forks == ({"foreign": 2} if agent == "smolagents_tools" else {})
    assert sum(sample.metadata["agent"]["turns"] for sample in samples) == 3 and len(samples) == 1 + sum(forks.values())
    masks = [np.flatnonzero(sample.loss_mask) + sample.prompt_length for sample in samples]
    trained = [s.tokens[place] for s, mask in zip(samples, masks, strict=True) for place in mask]
    assert trained == [token for part in sampled for token in part.tokens]
    log_probs = [s.rollout_log_probs[i - s.prompt_length] for s, m in zip(samples, masks, strict=True) for i in m]
    assert log_probs == [value for part in sampled for value in part.log_probs]
