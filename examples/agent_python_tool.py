"""An agent that runs Python programs in a sandbox. Each execution has one sandbox, which keeps files between calls.

    python -m examples.run agent_python_tool

The sandbox starts at the first tool call and ends with the execution. The reward is 1 for the correct number, minus 0.1
for each failed call.
"""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack
from typing import Any

from examples.agent_openai_loop import client_of, solve
from slime.agent.execution import execution
from slime.agent.sandbox.local import LocalSandbox
from slime.core.sample import Sample
from slime.rollout.sample_metrics import count_tool_call, expect_tools

FLAGS = "--custom-generate-function-path examples.agent_python_tool:generate"
FAILED_CALL, MOST_CHARACTERS, LIMIT_S = 0.1, 400, 10.0
HOW = "Compute with Python, then answer with the number alone."
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "What a Python program prints. Files stay until the end.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


def rows() -> list[dict[str, Any]]:
    """Returns the dataset: sums of squares."""
    asked = [(f"What is {a}*{a} + {b}*{b}?", str(a * a + b * b)) for a in range(2, 12) for b in range(2, 5)]
    system = {"role": "system", "content": HOW}
    return [{"prompt": [system, {"role": "user", "content": question}], "label": label} for question, label in asked]


class Python:
    """The tool, a context manager that ends its sandbox."""

    def __init__(self) -> None:
        self.failed = 0
        self._sandbox: LocalSandbox | None = None
        self._ends = AsyncExitStack()

    async def __aenter__(self) -> Python:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._ends.aclose()

    async def __call__(self, function: Any) -> str:
        """Returns the output of the program, or the reason why the call failed."""
        try:
            code = json.loads(function.arguments)["code"]
            if function.name != "python" or not isinstance(code, str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self.failed += 1
            return 'error: call python with {"code": "..."}'
        if self._sandbox is None:
            self._sandbox = await self._ends.enter_async_context(LocalSandbox())
        await self._sandbox.write_file("program.py", code)
        ended = await self._sandbox.exec("python3 program.py", timeout_s=LIMIT_S)
        self.failed += ended.code != 0
        late = f"error: over {LIMIT_S:g} s" if ended.timed_out else ""
        return (ended.stdout + ended.stderr + late)[-MOST_CHARACTERS:]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: one session with at most one sandbox."""
    expect_tools(sample)
    async with execution(sampling_params) as agent, client_of(agent) as client, Python() as python:

        async def ran(call: Any) -> str:
            before = python.failed
            result = await python(call.function)
            count_tool_call(sample, failed=python.failed > before)
            return result

        said = await solve(client, [dict(m) for m in sample.prompt], TOOLS, ran)  # type: ignore[arg-type]
        right = re.findall(r"-?\d+", said)[-1:] == [str(sample.label)]
        return agent.samples(sample, reward=float(right) - FAILED_CALL * python.failed)
