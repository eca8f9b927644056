"""Claude Code, Codex and opencode as they come from npm, each through its own API: a task with a tool, to its end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from slime.agent.harness import ClaudeCodeHarness, CodexHarness, Harness, OpenCodeHarness
from slime.agent.sandbox.local import LocalSandbox
from slime.core.errors import Unconfined
from slime.core.sample import Sample, Status
from tests.support.agent_room import END, Room, agent_room
from tests.support.command_lines import PlainShell, folder_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASK = "MAKE-THE-FILE made.txt"
LIMIT_S = 300.0
CALLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": "echo hello > made.txt", "description": "write"},
    "bash": {"command": "echo hello > made.txt", "description": "write"},
    "exec_command": {"cmd": "echo hello > made.txt"},
}
"""Tool -> arguments: each program has one of them."""
LAST = "It is written."
HARNESSES = [ClaudeCodeHarness(), CodexHarness(), OpenCodeHarness()]


class Scripted(deque[str]):
    """What a model says that does the task with whatever shell it is offered."""

    room: Room

    def popleft(self) -> str:
        prompt = self.room.read[-1]
        if "<tool_response>" in prompt[-2000:]:
            return LAST
        tool = next((name for name in CALLS if TASK in prompt and f'"name": "{name}"' in prompt), None)
        if tool is None:
            return "A title"
        call = json.dumps({"name": tool, "arguments": CALLS[tool]})
        return f"I write it.\n<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda h: h.name)
def test_a_command_line_completes_a_task(harness: Harness, tmp_path: Path) -> None:
    """Law: an unmodified program works, and its conversation is one sample in which each answer is trained."""
    shell = PlainShell(str(folder_with(harness)))
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()

    async def run() -> None:
        async with agent_room() as room:
            room.model.script = Scripted()
            room.model.script.room = room
            done = await harness.run(
                shell, TASK, url=room.url, key=room.key, folder=str(work), home=str(home), timeout_s=LIMIT_S
            )
            assert done.code == 0 and not done.timed_out, done
            assert (work / "made.txt").read_text() == "hello\n" and LAST in done.output, done
            samples = room.adapter.finish_session(room.key, Sample(index=0, group_index=0), reward=1.0)
            (task,) = [one for one in samples if TASK in room.tokenizer.decode(one.tokens) and LAST in one.response]
            trained = [
                t for t, kept in zip(task.tokens[task.prompt_length :], task.loss_mask or (), strict=True) if kept
            ]
            said = room.tokenizer.decode(trained)
            assert said.startswith("I write it.\n<tool_call>") and said.endswith(LAST + END), said
            assert said.count(END) == 2 and task.metadata["agent"]["turns"] == 2, task.metadata

    asyncio.run(run())


class Wordy(deque[str]):
    """What a model says that fills its context by the results of calls, and then ends."""

    room: Room
    num_calls = 0

    def popleft(self) -> str:
        tool = next((name for name in CALLS if f'"name": "{name}"' in self.room.read[-1]), None)
        if tool is None or self.num_calls == 2:
            return LAST
        self.num_calls += 1
        command = f"seq {self.num_calls}000 {self.num_calls}900"
        given = {name: command if name in ("cmd", "command") else text for name, text in CALLS[tool].items()}
        call = json.dumps({"name": tool, "arguments": given})
        return f"I look.\n<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("harness", "context", "says"),
    [
        (HARNESSES[0], 21_000, LAST),
        (HARNESSES[1], 14_200, "ran out of room in the model's context window"),
        (HARNESSES[2], 15_200, LAST),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_command_line_recognises_a_full_context(harness: Harness, context: int, says: str, tmp_path: Path) -> None:
    """Law: Claude Code and opencode shorten their history and ask again; Codex says what the matter is. The contexts
    hold each program's first prompt and one of three results.
    """
    shell = PlainShell(str(folder_with(harness)))
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()

    async def run() -> None:
        async with agent_room() as room:
            room.model.script = Wordy()
            room.model.script.room = room
            key = room.adapter.open_session(max_context_tokens=context)
            done = await harness.run(
                shell, "Look around.", url=room.url, key=key, folder=str(work), home=str(home), timeout_s=LIMIT_S
            )
            assert says in done.output and not done.timed_out, done
            samples = room.adapter.finish_session(key, Sample(index=0, group_index=0), reward=1.0)
            assert all(len(sample.tokens) <= context for sample in samples)
            shortened = sum(sample.metadata["agent"]["branch"] != "first" for sample in samples)
            if harness.name == "codex":
                assert [sample.status for sample in samples] == [Status.TRUNCATED]
            else:
                assert shortened, "it gave up"

    asyncio.run(run())


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda h: h.name)
def test_a_command_line_works_in_a_sandbox(harness: Harness) -> None:
    """Law: a program that reaches the adapter alone, and reads nothing but the system and itself, completes a task."""
    program = folder_with(harness).parents[1]

    async def run() -> None:
        async with agent_room() as room:
            room.model.script = Scripted()
            room.model.script.room = room
            reach = urlsplit(room.url)
            sandbox = LocalSandbox(
                reach=(str(reach.hostname), int(reach.port or 0)),
                readable=(program,),
                memory_bytes=8 << 30,
                processes=512,
            )
            async with sandbox:
                await sandbox.exec("mkdir repository home", check=True)
                done = await harness.run(
                    sandbox,
                    TASK,
                    url=room.url,
                    key=room.key,
                    folder=f"{sandbox.folder}/repository",
                    home=f"{sandbox.folder}/home",
                    path=f"{program}/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
                    timeout_s=LIMIT_S,
                )
                assert done.code == 0 and not done.timed_out and LAST in done.output, done
                assert await sandbox.read_file("repository/made.txt") == b"hello\n"

    try:
        asyncio.run(run())
    except Unconfined as refusal:
        pytest.skip(str(refusal))
