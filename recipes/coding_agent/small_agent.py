"""A coding agent in one file, without packages. Run `small_agent.py ISSUE` in the folder of a repository.

Up to `MAX_TURNS` times, the agent shows the model the issue and the files, writes the file that the model returns in a
code block, runs the tests, and shows their output. OPENAI_BASE_URL and OPENAI_API_KEY name the model's server and key.
This file imports nothing from slime.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

MAX_TURNS = 3
MAX_SHOWN = 1500
"""Characters of the tests' output that the model sees."""
ANSWER_S, TESTS_S = 600, 60
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
OPENED = re.compile(r"```(?:python|py)?[ \t]*\n")
NAMED = re.compile(r"\A\s*#\s*(\S+\.py)[ \t]*\n")
ASKED = "Answer with the whole mended file in one ```python block, with its name as a comment in the first line: # {}"
WITHOUT_BLOCK = "There is no ```python block in that. " + ASKED
UNCLOSED = "The ```python block in that is not closed. " + ASKED


def source_files() -> list[Path]:
    """Returns the Python files, tests last."""
    found = sorted(p.relative_to(".") for p in Path(".").rglob("*.py"))
    return sorted(found, key=lambda p: (p.name.startswith("test_"), not p.stat().st_size))


def suspect(issue: str, files: list[Path]) -> Path:
    """Returns the file that the issue is probably about: it defines a function that the issue calls."""
    names = re.findall(r"\b(\w+)\(", issue)
    defined = [p for p in files if any(f"def {name}(" in p.read_text() for name in names)]
    return (defined or files)[0]


def ask(messages: list[dict[str, str]]) -> str:
    """Returns the model's response."""
    body = json.dumps({"model": os.environ.get("SLIME_MODEL", "model"), "messages": messages})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
        data=body.encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def write_block(answer: str, usual: Path) -> bool:
    """Writes the last code block to the file that it names, or to `usual`; False without one."""
    blocks = BLOCK.findall(answer)
    if not blocks:
        return False
    named = NAMED.match(blocks[-1])
    path = Path(named[1]) if named and not Path(named[1]).is_absolute() and ".." not in named[1] else usual
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(blocks[-1])
    return True


def run_tests() -> tuple[bool, str]:
    """Returns (whether the tests pass, the end of their output)."""
    command = [sys.executable, "-m", "unittest", "-q"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TESTS_S)
    except subprocess.TimeoutExpired:
        return False, f"The tests did not end within {TESTS_S} seconds."
    return done.returncode == 0, (done.stdout + done.stderr)[-MAX_SHOWN:]


def main() -> int:
    """Returns exit status 0 if the tests pass at the end."""
    issue, files = sys.argv[1], source_files()
    usual = suspect(issue, files)
    shown = "\n\n".join(f"{path}:\n```python\n{path.read_text()}```" for path in files if path.stat().st_size)
    messages = [{"role": "user", "content": f"{issue}\n\n{shown}\n\n{ASKED.format(usual)}"}]
    for turn in range(MAX_TURNS):
        answer = ask(messages)
        if write_block(answer, usual):
            passed, said = run_tests()
            print(f"turn {turn}: {'passed' if passed else 'failed'}\n{said}")
            if passed:
                return 0
            reply = f"The tests fail:\n```\n{said}```\n{ASKED.format(usual)}"
        else:
            opened = OPENED.search(answer) is not None
            print(f"turn {turn}: {'a code block that is not closed' if opened else 'no code block'}")
            reply = (UNCLOSED if opened else WITHOUT_BLOCK).format(usual)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
    return 1


if __name__ == "__main__":
    sys.exit(main())
