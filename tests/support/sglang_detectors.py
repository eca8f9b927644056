"""What SGLang's own detectors read in answers: run as a program, as its imports leave traces in a process.

Reads a JSON list of [format, tools, text, thinks] from stdin and prints a list of [thinking, text, [[name, arguments],
...]]. `thinks`: the prompt has begun the thinking. First the detector of thinking reads, then that of calls, as the
server of SGLang reads a whole answer. What it makes of a stream depends on where that is split, so it is no oracle.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REASONING = {
    "hermes": "qwen3",
    "qwen25": "qwen3",
    "qwen3_coder": "qwen3",
    "glm45": "glm45",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "deepseekv3": "deepseek-v3",
    "deepseekv31": "deepseek-v3",
    "deepseekv32": "deepseek-v3",
    "minimax-m2": "minimax",
    "gpt-oss": "gpt-oss",
}
"""Format of calls -> SGLang's detector of thinking for the family; the others do not think."""
Case = tuple[str, Any, str, bool]


def read_by_sglang(cases: list[Case]) -> list[Any]:
    """What SGLang makes of answers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sglang_detectors"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    import logging

    from slime.compat.sglang_cpu import activate

    activate("cpu")
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    logging.disable(logging.CRITICAL)

    def read(name: str, tools: list[Any], text: str, thinks: bool) -> list[Any]:
        thought = ""
        if name in REASONING:
            thought, text = ReasoningParser(REASONING[name], force_reasoning=thinks).parse_non_stream(text)
        parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
        words, calls = text or "", list[Any]()
        if parser.has_tool_call(words):
            with contextlib.suppress(Exception):  # the server then takes all of it for text
                words, calls = parser.parse_non_stream(words)
        return [thought or "", words, [[call.name, arguments(call.parameters)] for call in calls]]

    def arguments(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:  # some detectors let through what is no JSON
            return {"not JSON": text}

    print(json.dumps([read(*case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
