"""Code: runs the last code block of the answer, a Python program, against the tests of the row, each in a sandbox.

The tests are in `metadata["tests"]`, or else in the label, optionally as JSON text. Supported formats:
- `[{"input": text, "output": text}, ...]` or `{"inputs": [...], "outputs": [...]}`: standard input and output;
- `inputs` and `outputs` with `"fn_name"`: each input is an argument list, each output the return value of the function;
- a list of Python statements, or a single string of statements: assertions. With `metadata["entry_point"]`, the string
  or an entry of the list defines `check(candidate)`, as in HumanEval (Chen et al., 2021, arXiv:2107.03374). List
  entries that use no name from the program are not tests but setup code, which runs before each test.

The score is the fraction of tests passed. With `metadata["code_reward"] = "all"`, it is 1.0 if all pass, else 0.0.
Each test is limited by `metadata["time_limit_s"]` (4) and `metadata["memory_limit_mb"]` (1024). If a test times out, it
fails, and so do all later tests. All tests together can take `--reward-timeout-s` plus `SECONDS_PER_TEST` per test on
the program's own clock (`program_sandbox`); after that, the remaining tests fail. The expected values of a test are
never in the same process as the program.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.assertions import names_in
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import after_thinking

TIME_LIMIT_S, MEMORY_LIMIT_MB = 4.0, 1024
SECONDS_PER_TEST = 1.0
"""Added to the total time limit for each test, or the test's own limit if that is lower."""
_BLOCK = re.compile(r"^[ \t]*+```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
PYTHON = frozenset({"", "python", "py", "python3"})


@dataclass(frozen=True, slots=True)
class Case:
    request: dict[str, Any]
    """The request to the sandbox, without the program."""
    stdin: str
    expected: Any
    """Printed text, return value, or True for assertions."""
    kind: str
    """`stdin`, `call` or `assert`."""


def last_program(response: str) -> str | None:
    """Returns the last complete code block that is marked as Python or not marked; None if there is none."""
    blocks = [body for language, body in _BLOCK.findall(after_thinking(response)) if language.lower() in PYTHON]
    return blocks[-1] if blocks else None


def cases_of(sample: Sample) -> list[Case]:
    """Parses the tests of a row. Raises `DataError` if there are none or their format is unknown."""
    tests = sample.metadata.get("tests", sample.label)
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as problem:
            raise DataError(f"the tests are not valid JSON ({problem}); write a list or an object") from None
    if isinstance(tests, dict) and len(tests.get("inputs", ())) == len(tests.get("outputs", ())) > 0:
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        name = tests.get("fn_name") or sample.metadata.get("fn_name")
        if name:
            return [Case({"function": str(name), "arguments": list(i)}, "", o, "call") for i, o in pairs]
        return [Case({}, _text(i), _text(o), "stdin") for i, o in pairs]
    if isinstance(tests, str) and tests.strip():
        return _assertions([tests], sample.metadata.get("entry_point"))
    if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
        entry_point = sample.metadata.get("entry_point")
        if entry_point and any(re.search(r"^def check\b", one, re.MULTILINE) for one in tests):
            return _assertions(["\n".join(tests)], entry_point)
        return _assertions(tests, None)
    if isinstance(tests, list) and tests and all(isinstance(t, dict) and {"input", "output"} <= set(t) for t in tests):
        return [Case({}, _text(t["input"]), _text(t["output"]), "stdin") for t in tests]
    raise DataError(
        f"the tests {str(tests)!r:.100} have an unknown format; metadata['tests'] (or the label) must be "
        "[{'input', 'output'}], {'inputs', 'outputs'[, 'fn_name']}, or Python assertions"
    )


def _assertions(statements: list[str], entry_point: Any) -> list[Case]:
    """Builds test cases from assertions. Raises `DataError` if they are not Python or use no name from the program."""
    entry = str(entry_point) if entry_point else None
    try:
        found = [names_in([statement], entry) for statement in statements]
    except SyntaxError as problem:
        raise DataError(f"the tests are not valid Python ({problem})") from None
    bound = frozenset().union(*(names.bound for names in found))
    if entry and "check" not in bound:
        raise DataError("metadata names an entry_point, but the tests do not define check(candidate)")
    pairs = list(zip(statements, found, strict=True))
    setup = [statement for statement, names in pairs if not names.free - bound and not entry]
    cases = []
    for statement in (statement for statement, names in pairs if names.free - bound or entry):
        whole = [*setup, statement, *([f"check({entry})"] if entry else [])]
        names = names_in(whole, entry)
        requested = [name for name in names.requested if name != "check" or not entry]
        test = {"statements": whole, "names": requested, "modules": names.modules}
        cases.append(Case({"asserts": test}, "", True, "assert"))
    if not cases:
        raise DataError(
            "the assertions do not use the program; call one of its functions, or set metadata entry_point and define "
            "check(candidate)"
        )
    return cases


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_output(printed: str, expected: str) -> bool:
    """Returns whether outputs are equal up to trailing whitespace, or word by word up to a tolerance of 1e-6."""
    if _lines(printed) == _lines(expected):
        return True
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _close(a, b) for a, b in zip(ours, theirs, strict=True))


def _close(word: str, expected: str) -> bool:
    if len(word) > 64 or not any(c in expected for c in ".eE"):
        return False  # integers must match as text
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Compares JSON values, with a tolerance of 1e-6 for floats. A tuple equals a list, but True does not equal 1.

    Values that cannot be compared, such as a float and an integer too large for a float, are unequal.
    """
    try:
        return _same(got, expected)
    except (ArithmeticError, RecursionError):
        return False


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple) and isinstance(got, list):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        return got.keys() == expected.keys() and all(_same(got[k], v) for k, v in expected.items())
    if isinstance(expected, float) and isinstance(got, int | float) and not isinstance(got, bool):
        return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return isinstance(got, bool) == isinstance(expected, bool) and bool(got == expected)


@GRADERS.register("code")
@dataclass(frozen=True, kw_only=True)
class ProgramTests(Grader):
    """The fraction of the row's tests that the program passes."""

    is_slow = True
    runs_code = True
    wrong = 0.0

    allow_unconfined_code: bool = False
    """Run programs even if this machine cannot confine them."""

    def limit_of(self, sample: Sample, limit_s: float) -> float:
        """Returns the time limit for all tests together, on the program's clock. Raises `DataError` if there are
        none."""
        return limit_s + len(cases_of(sample)) * min(_time_limit_s(sample), SECONDS_PER_TEST)

    def prepare(self, sample: Sample) -> None:
        cases_of(sample)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns the fraction of tests passed (0.0 or 1.0 with `code_reward` "all"); 0.0 without a complete block.

        Raises `DataError` if there are no tests, or one cannot be checked from outside the program; `Unconfined` if
        this machine cannot confine programs and `--allow-unconfined-code` is off; `OSError` if the machine cannot run
        the program.
        """
        from slime.rewards.program_sandbox import Sandbox

        cases, program = cases_of(sample), last_program(sample.response)
        all_or_nothing = {"all": True, "share": False}.get(sample.metadata.get("code_reward", "share"))
        if all_or_nothing is None:
            raise DataError(f"metadata code_reward must be 'share' or 'all', got {sample.metadata['code_reward']!r}")
        if program is None:
            return 0.0
        own_s, num_passed = 0.0, 0
        with Sandbox(
            program,
            time_limit_s=_time_limit_s(sample),
            memory_bytes=int(sample.metadata.get("memory_limit_mb", MEMORY_LIMIT_MB)) * 2**20,
            allow_unconfined=self.allow_unconfined_code,
        ) as sandbox:
            for case in cases:
                ended = sandbox.run(case.request, stdin=case.stdin)
                if case.kind == "stdin":
                    passed = ended.code == 0 and same_output(ended.output, case.expected)
                elif case.kind == "assert" and ended.result is not None and isinstance(ended.result[0], str):
                    raise DataError(f"a test cannot be checked from outside the program: {ended.result[0]}")
                else:
                    passed = ended.result is not None and same_value(ended.result[0], case.expected)
                num_passed += passed
                own_s += ended.own_s
                if ended.timed_out or own_s > limit_s or (all_or_nothing and not passed):
                    break
        return float(num_passed == len(cases)) if all_or_nothing else num_passed / len(cases)


def _time_limit_s(sample: Sample) -> float:
    return float(sample.metadata.get("time_limit_s", TIME_LIMIT_S))
