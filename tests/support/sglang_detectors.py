"""What SGLang's own detectors read in answers: run as a program, as its imports leave traces in a process.

Reads a JSON list of [format, tools, text] from stdin and prints a list of [text, [[name, arguments], ...]]; with the
format `thinking` a list of [text, thinking].
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def read_by_sglang(cases: list[tuple[str, Any, str]]) -> list[Any]:
    """What SGLang makes of (format, tools, answer)."""
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
    from slime.compat.sglang_cpu import activate

    activate("cpu")
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import Qwen3Detector

    out: list[Any] = []
    for name, tools, text in json.load(sys.stdin):
        if name == "thinking":
            split = Qwen3Detector().detect_and_parse(text)
            out.append([split.normal_text, split.reasoning_text])
            continue
        detector = FunctionCallParser.ToolCallParserEnum[name]()
        found = detector.detect_and_parse(text, [Tool(**tool) for tool in tools])
        out.append([found.normal_text, [[call.name, json.loads(call.parameters)] for call in found.calls]])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
