"""Code: the last code block of the answer, a Python program, is run against the tests of its row, each in a sandbox.

The tests stand in `metadata["tests"]`, else in the label (as JSON text or not), in one of these shapes:
- `[{"input": text, "output": text}, ...]` or `{"inputs": [...], "outputs": [...]}`: standard input and output;
- the latter with `"fn_name"`: each input is the list of arguments, each output what the function returns;
- a list of Python statements, or one text of them: assertions; with `metadata["entry_point"]` the text defines
  `check(candidate)`, as HumanEval does (Chen et al., 2021, arXiv:2107.03374).

The score is the share of tests passed, or with `metadata["code_reward"] = "all"` 1.0 for all of them, else 0.0.
`metadata["time_limit_s"]` (4) and `metadata["memory_limit_mb"]` (1024) bound one test. A program that is too slow fails
its test and is not asked again: the tests after it count as failed. All tests together may take `--reward-timeout-s`
and `SECONDS_PER_TEST` more for each, so that no answer is left unscored for the number of its tests alone. What the
tests check never shares a process with the program, assertions excepted (`sandbox`).
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DataError, DeadlineExceeded
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import after_thinking

TIME_LIMIT_S, MEMORY_LIMIT_MB = 4.0, 1024
SECONDS_PER_TEST = 1.0
"""What each test adds to the limit of all, unless its own limit is lower."""
BUDGET_SHARE = 0.8
"""Of the pool's limit that the tests of one answer may take together; beyond it the answer stays unscored."""
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = frozenset({"", "python", "py", "python3"})


@dataclass(frozen=True, slots=True)
class Case:
    """One test."""

    request: dict[str, Any]
    """What the sandbox gets beside the program."""
    stdin: str
    expected: Any
    """Printed text, returned value, or True for assertions that hold."""
    kind: str
    """`stdin`, `call` or `assert`."""


def last_program(response: str) -> str | None:
    """The last complete code block that is Python or says no language; None without one."""
    blocks = [body for language, body in _BLOCK.findall(after_thinking(response)) if language.lower() in PYTHON]
    return blocks[-1] if blocks else None


def cases_of(sample: Sample) -> list[Case]:
    """The tests of the row. Raises `DataError` if it has none or in no known shape."""
    tests = sample.metadata.get("tests", sample.label)
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as problem:
            raise DataError(f"got tests that are not JSON ({problem}); write a list or an object") from None
    if isinstance(tests, dict) and len(tests.get("inputs", ())) == len(tests.get("outputs", ())) > 0:
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        name = tests.get("fn_name") or sample.metadata.get("fn_name")
        if name:
            return [Case({"function": str(name), "arguments": list(i)}, "", o, "call") for i, o in pairs]
        return [Case({}, _text(i), _text(o), "stdin") for i, o in pairs]
    if isinstance(tests, str) and tests.strip():
        entry = sample.metadata.get("entry_point")
        statements = [tests, f"check({entry})"] if entry else [tests]
        return [Case({"checked": True, "asserts": statements}, "", True, "assert")]
    if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
        return [Case({"checked": True, "asserts": [t]}, "", True, "assert") for t in tests]
    if isinstance(tests, list) and tests and all(isinstance(t, dict) and {"input", "output"} <= set(t) for t in tests):
        return [Case({}, _text(t["input"]), _text(t["output"]), "stdin") for t in tests]
    raise DataError(
        f"got tests {str(tests)!r:.100}; the code grader needs metadata['tests'] (or the label) as "
        "[{'input', 'output'}], {'inputs', 'outputs'[, 'fn_name']}, or Python assertions"
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_output(printed: str, expected: str) -> bool:
    """Equal but for white space at line ends and at the end; else word by word, where floats may differ by 1e-6."""
    if _lines(printed) == _lines(expected):
        return True
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _close(a, b) for a, b in zip(ours, theirs, strict=True))


def _close(word: str, expected: str) -> bool:
    if len(word) > 64 or not any(c in expected for c in ".eE"):
        return False  # whole numbers are compared as text
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Equal as JSON values (a tuple is a list), floats within 1e-6; True does not equal 1."""
    if isinstance(expected, list | tuple) and isinstance(got, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        return got.keys() == expected.keys() and all(same_value(got[k], v) for k, v in expected.items())
    if isinstance(expected, float) and isinstance(got, int | float) and not isinstance(got, bool):
        return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return isinstance(got, bool) == isinstance(expected, bool) and bool(got == expected)


@GRADERS.register("code")
@dataclass(frozen=True, kw_only=True)
class ProgramTests(Grader):
    """The program passes the tests of its row."""

    is_slow = True
    runs_code = True
    wrong = 0.0

    allow_unconfined_code: bool = False
    """Run programs also where nothing holds them."""

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """It grows with the number of tests. Raises `DataError` on a row without tests."""
        return limit_s + len(cases_of(sample)) * min(_time_limit_s(sample), SECONDS_PER_TEST)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns the share of tests passed, or 0.0 / 1.0; without a complete code block 0.0.

        Raises `DataError` on a row without tests, `DeadlineExceeded` if the tests together take too long, `Unconfined`
        where nothing holds a program and `--allow-unconfined-code` was not given.
        """
        from slime.rewards.graders.sandbox import Sandbox

        cases, program = cases_of(sample), last_program(sample.response)
        all_or_nothing = {"all": True, "share": False}.get(sample.metadata.get("code_reward", "share"))
        if all_or_nothing is None:
            raise DataError(f"got metadata code_reward {sample.metadata['code_reward']!r}; write 'share' or 'all'")
        if program is None:
            return 0.0
        budget_s, started, num_passed = BUDGET_SHARE * limit_s, time.monotonic(), 0
        with Sandbox(
            program,
            time_limit_s=_time_limit_s(sample),
            memory_bytes=int(sample.metadata.get("memory_limit_mb", MEMORY_LIMIT_MB)) * 2**20,
            allow_unconfined=self.allow_unconfined_code,
        ) as sandbox:
            for number, case in enumerate(cases):
                if time.monotonic() - started > budget_s:
                    raise DeadlineExceeded.waiting(
                        owner="the code grader",
                        for_what=f"{len(cases)} tests",
                        limit_s=budget_s,
                        last_progress=f"{number} run, {num_passed} passed",
                    )
                ended = sandbox.run(case.request, stdin=case.stdin)
                if case.kind == "stdin":
                    passed = ended.code == 0 and same_output(ended.output, case.expected)
                else:
                    passed = ended.result is not None and same_value(ended.result[0], case.expected)
                num_passed += passed
                if ended.timed_out or (all_or_nothing and not passed):
                    break
        return float(num_passed == len(cases)) if all_or_nothing else num_passed / len(cases)


def _time_limit_s(sample: Sample) -> float:
    """Seconds of one test."""
    return float(sample.metadata.get("time_limit_s", TIME_LIMIT_S))
