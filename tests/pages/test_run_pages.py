"""A page of docs/path passes if, and only if, its reader would see what it shows."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.pages import run_pages
from tests.pages.run_pages import PageError, main, run_page

GOOD = """# A page

```bash title="setup"
exit 9
```

```python title="parts/hello.py"
print("step 3/3  reward 0.25  12 s")
print("in between")
print("  answer: forty two")
```

```bash
greeting=hello
python parts/hello.py
mkdir below && cd below
```

Explained.

```text title="output"
step 1/3 reward -1.5e-3 7.25 s
...
answer: …
```

```bash title="fails"
test -e ../parts/hello.py
echo "$greeting, $(basename "$PWD")"
false
echo not reached
```

```text title="output"
hello, below
```
"""


def page_of(text: str, tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "above" / "path"
    folder.mkdir(parents=True)
    page = tmp_path / "page.md"
    page.write_text(text)
    return page, folder


def error_of(text: str, tmp_path: Path, timeout_s: float = 60.0) -> str:
    with pytest.raises(PageError) as caught:
        run_page(*page_of(text, tmp_path), timeout_s)
    return str(caught.value)


def test_a_page_whose_commands_print_what_it_shows_passes(tmp_path: Path) -> None:
    """Files, variables and the folder last from block to block; numbers, space and `…` may differ."""
    run_page(*page_of(GOOD, tmp_path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("reward -1.5e-3", "score -1.5e-3"),  # a word
        ("1/3 reward -1.5e-3 7.25 s", "1/3 reward nan 7.25 s"),  # a number that is none
        ("1/3 reward -1.5e-3 7.25 s", "1/3 reward -1.5e-3"),  # the rest of a line
        ("step 1/3 reward -1.5e-3 7.25 s\n...\nanswer: …", "answer: …\nstep 1/3 reward -1.5e-3 7.25 s"),  # the order
    ],
)
def test_a_page_that_shows_something_else_fails_and_both_are_told(before: str, after: str, tmp_path: Path) -> None:
    assert before in GOOD
    told = error_of(GOOD.replace(before, after), tmp_path)
    assert after.split("\n")[-1] in told and "step 3/3  reward 0.25  12 s" in told and "page.md, line 2" in told


def test_a_command_that_fails_ends_the_page(tmp_path: Path) -> None:
    told = error_of("```bash\necho before\nls nowhere | cat\necho after\n```\n", tmp_path)
    assert "exit code 2" in told and "  | before" in told and "nowhere" in told and "  | after" not in told


def test_commands_that_the_page_says_fail_must_fail(tmp_path: Path) -> None:
    assert "succeeded" in error_of('```bash title="fails"\ntrue\n```\n', tmp_path)


def test_a_page_has_a_time_limit_and_leaves_nothing_running(tmp_path: Path) -> None:
    text = "```bash\nsleep 4321.5 &\necho $! > started\n```\n\n```bash\nsleep 4321.6\n```\n"
    told = error_of(text, tmp_path, timeout_s=0.5)
    assert "not ended after 0.5 s" in told and "sleep 4321.6" in told
    pid = int((tmp_path / "above" / "path" / "started").read_text())
    assert not runs(pid), f"process {pid}, which the page started in the background, still runs"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_runner_that_is_asked_to_end_ends_its_page(number: signal.Signals, tmp_path: Path) -> None:
    page, _ = page_of(f"```bash\necho $$ > {tmp_path}/started\nsleep 4321.7\n```\n", tmp_path)
    runner = subprocess.Popen([sys.executable, run_pages.__file__, str(page)], stdout=subprocess.DEVNULL)
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        time.sleep(0.05)
    runner.send_signal(number)
    assert runner.wait() != 0
    assert not runs(int((tmp_path / "started").read_text()))


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("fence", ["```", "```text", "```python", '```bash title="sometimes"', "```bash hl_lines=2"])
def test_a_block_that_nothing_would_check_is_refused(fence: str, tmp_path: Path) -> None:
    assert "neither run, nor written, nor compared" in error_of(f"{fence}\nx\n```\n", tmp_path)


def test_a_page_finds_the_checkout_only_if_it_names_it(tmp_path: Path) -> None:
    told = error_of("```bash\nls ..\nexit 3\n```\n", tmp_path)
    assert "exit code 3" in told and "| slime" not in told
    page, folder = page_of("```bash\ntest -f ../slime/train.py\n```\n", tmp_path / "other")
    run_page(page, folder)


def test_the_program_says_which_pages_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("```bash\ntrue\n```\n")
    bad.write_text("```bash\nfalse\n```\n")
    assert main([str(good)]) == 0
    assert main([str(good), str(bad)]) == 1
    assert "bad.md: FAILED" in (out := capsys.readouterr().out) and "1 of 2 pages passed" in out
