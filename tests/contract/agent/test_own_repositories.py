"""Repositories and tests of a user's own, as rows of the coding agent, in real sandboxes."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.coding_agent import grading, prepare
from recipes.coding_agent.generate import sandbox_of
from recipes.coding_agent.prepare import main, require_room
from recipes.coding_agent.repository import check, read_rows, row, write
from slime.agent.sandbox.local import LocalSandbox
from slime.core.errors import ConfigError
from slime.core.user_files import read_yaml
from tests.support.marks import quick
from tests.support.watched_sandbox import require_confinement

SETTINGS = argparse.Namespace(coding_sandbox="local", coding_sandbox_settings={}, coding_max_sandboxes=2)
ROOM = {"coding_max_context_tokens": 32768}
RUN = "python3 -m unittest -q test_hidden"
WRONG, RIGHT = "def double(x):\n    return x\n", "def double(x):\n    return 2 * x\n"
HIDDEN = "import unittest\nfrom a.sums import double\n\n\nclass T(unittest.TestCase):\n"
HIDDEN += "    def test(self):\n        self.assertEqual(double(4), 8)\n"


@pytest.fixture
def confined() -> None:
    require_confinement()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a bug, its hidden tests and its solution beside it."""
    texts = {
        "mine/a/sums.py": WRONG,
        "mine/.git/config": "[core]",
        "mine/a/__pycache__/sums.pyc": "x",
        "mine/docs/page.md": "text",
        "tests/test_hidden.py": HIDDEN,
        "solution/a/sums.py": RIGHT,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "mine"


def own(repository: Path, **more: Any) -> dict[str, Any]:
    words: dict[str, Any] = {"issue": "double(4) is 4.", "hidden": repository.with_name("tests"), "command": RUN}
    return row(repository, **{**words, **more})


def test_a_folder_becomes_a_row(repository: Path, tmp_path: Path) -> None:
    """Law: the agent gets the files that git would show, and a dataset can be read as it was written."""
    made = own(repository, leave_out=["docs/*"], solution=repository.with_name("solution"))
    assert made["metadata"] == {
        "files": {"a/sums.py": WRONG},
        "hidden": {"files": {"test_hidden.py": HIDDEN}, "command": RUN, "timeout_s": grading.TESTS_S},
        "solution": {"a/sums.py": RIGHT},
    }
    assert read_rows(write(tmp_path / "new" / "tasks.jsonl", [made])) == [made]


def test_what_could_not_reach_the_tests_is_refused(repository: Path) -> None:
    (repository / "logo.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match=r'logo.png is not UTF-8 text; leave it out: leave_out=\["\*logo.png"\]'):
        own(repository)
    (repository / "logo.png").write_text("x" * (grading.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=r"logo.png has 262145 bytes, but the limit is 262144"):
        own(repository)
    assert "logo.png" not in own(repository, leave_out=["*logo.png"])["metadata"]["files"]
    for number in range(grading.MAX_FILES):
        (repository / f"{number}.txt").write_text("")
    with pytest.raises(ConfigError, match=r"has 202 files, but the limit is 200"):
        own(repository, leave_out=["*logo.png"])
    with pytest.raises(ConfigError, match="absent does not exist"):
        own(repository.with_name("absent"))
    with pytest.raises(ConfigError, match="one of them is empty"):
        own(repository, command=" ")


CASES = {
    "tests that cover the bug": ({}, None),
    "the same without a solution": ({"solution": None}, None),
    "tests that pass already": (
        {"command": "python3 -c 'import a.sums'"},
        "its hidden tests pass before anything is repaired",
    ),
    "a command that does not end": (
        {"command": "sleep 99", "timeout_s": 1, "solution": None},
        "did not end within 1 s on the unchanged repository",
    ),
    "a command that never ends": ({"command": "sleep 99", "timeout_s": 1}, "did not end within 1 s with the solution"),
    "a command that is not there": ({"command": "py-test -q"}, "the sandbox cannot run 'py-test -q'"),
    "a solution that is none": ({"command": f"{RUN} other"}, "the hidden tests fail with the solution, too, status 1"),
}


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize("case", quick(CASES, "tests that cover the bug", "tests that pass already"))
def test_tests_that_cannot_tell_good_from_bad_are_refused(case: str, repository: Path) -> None:
    """Law: before training, each task's tests fail without the repair and, if there is a solution, pass with it."""
    more, refusal = CASES[case]
    made = own(repository, **{"solution": repository.with_name("solution"), **more})
    if refusal is None:
        (said,) = asyncio.run(check(SETTINGS, [made]))
        assert said.startswith("task 1 (mine): the hidden tests fail")
        return
    with pytest.raises(ConfigError, match=refusal) as refused:
        asyncio.run(check(SETTINGS, [made]))
    assert str(refused.value).startswith("task 1 (mine): ") and "\n" not in str(refused.value)


REWARDS = {
    "the repair": ({"a/sums.py": RIGHT}, 1.0),
    "no repair": ({"a/sums.py": WRONG}, 0.0),
    "other tests in place of the hidden ones": ({"a/sums.py": WRONG, "test_hidden.py": ""}, 0.0),
    "a folder in place of the hidden tests": ({"a/sums.py": RIGHT, "test_hidden.py/x.py": ""}, 1.0),
    "code that does not end": ({"a/sums.py": "while True:\n    pass\n"}, 0.0),
}


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize("case", quick(REWARDS, "the repair", "a folder in place of the hidden tests"))
def test_a_command_is_the_reward(case: str, repository: Path) -> None:
    """Law: hidden files replace the agent's, and the exit status alone decides."""
    files, reward = REWARDS[case]
    if case == "code that does not end":
        reason = {"code": 137, "timed_out": True}
    else:
        reason = {"code": int(reward == 0), "timed_out": False}
    hidden = own(repository, timeout_s=3)["metadata"]["hidden"]

    async def grade() -> tuple[float, dict[str, Any]]:
        async with LocalSandbox() as sandbox:
            return await grading.grade(sandbox, files, hidden)

    got, graded = asyncio.run(grade())
    assert got == reward and reason.items() <= graded.items()
    assert graded["timed_out"] or ("OK" if reward else "AssertionError") in graded["said"]


@pytest.mark.usefixtures("confined")
def test_the_first_call_that_fails_is_the_reason_for_a_reward() -> None:
    """Law: of hidden calls, too, a sample says which one decided, and what it said."""
    hidden = {"function": "sums.add", "keeps": [[[7, 0], 7]], "fixes": [[[4, 9], 13], [[1, "a"], 2]]}

    async def grade(text: str) -> tuple[float, dict[str, Any]]:
        async with LocalSandbox() as sandbox:
            return await grading.grade(sandbox, {"sums.py": f"def add(a, b):\n    return {text}\n"}, hidden)

    reward, graded = asyncio.run(grade("a + b"))
    assert reward == 0.5 and graded["code"] == 1 and "TypeError" in graded["said"]
    assert graded["said"].startswith("sums.add(*[1, 'a']) should return 2, but said:\n")
    assert asyncio.run(grade("5"))[1]["said"] == "sums.add(*[7, 0]) should return 7, but said:\n5"


@pytest.mark.usefixtures("confined")
def test_files_of_the_repository_are_kept_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an agent that makes many files loses the last of them, not the repository's."""
    monkeypatch.setattr(grading, "MAX_FILES", 3)

    async def kept() -> dict[str, bytes]:
        async with LocalSandbox() as sandbox:
            folder = await grading.lay_out(sandbox, {"z.py": "1"})
            await sandbox.exec(f"cd {folder} && touch 1 2 3", check=True)
            return await grading.files_of(sandbox, {"z.py": "1"})

    assert asyncio.run(kept()) == {"z.py": b"1", "1": b"", "2": b""}


def test_a_program_that_cannot_ask_its_first_question_is_refused() -> None:
    """Law: with the recipe's own settings, Claude Code would get no answer, and the message says how it gets one."""
    settings = read_yaml(str(Path(prepare.__file__).with_name("settings.yaml")), "CONFIG")["custom"]
    with pytest.raises(ConfigError, match="has about 21200 tokens, but coding_max_context_tokens is 4096"):
        require_room("claude_code", settings)
    require_room("small_agent", settings)
    require_room("claude_code", {**settings, "coding_program_flags": ["--bare", "--tools", "Bash"]})
    require_room("claude_code", {**settings, **ROOM})


def test_what_is_readable_adds_up() -> None:
    """Law: a folder that the user opens to sandboxes does not close the one of the agent's program."""
    own = {"readable": ["/opt/tests"], "processes": 3}
    args = argparse.Namespace(coding_sandbox="local", coding_sandbox_settings=own)
    made = sandbox_of(args, readable=(Path("/opt/agent"),), processes=512)
    assert isinstance(made, LocalSandbox) and made.processes == 3
    assert made.readable == (Path("/opt/agent"), Path("/opt/tests"))


def test_a_preparation_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a missing program, a missing file and a wrong row are told without a traceback."""
    (tmp_path / "settings.yaml").write_text(json.dumps({"custom": {"coding_programs": str(tmp_path), **ROOM}}))
    words = ["--out", str(tmp_path), "--config", str(tmp_path / "settings.yaml")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--harness", "claude_code"]) == 1
    assert capsys.readouterr().err == "harness claude_code comes from npm, which is not installed; install Node.js\n"
    assert main([*words, "--data", str(tmp_path / "absent.jsonl")]) == 1
    assert "absent.jsonl, which is not a file" in capsys.readouterr().err
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n')
    assert main([*words, "--data", str(tmp_path / "wrong.jsonl")]) == 1
    assert f"line 1 of {tmp_path}/wrong.jsonl is not a task" in capsys.readouterr().err
