"""Runs the pages of docs/path as a reader would: `python tests/pages/run_pages.py [PAGE ...]`, or all of them.

A page gets a fresh, empty folder and one shell (`bash -euo pipefail`, with the `slime` and `python` of this
interpreter's environment). Its blocks of code are taken in order, so a later block sees the files, variables, folder
and background processes of the earlier ones. Every block is one of these; anything else is an error, so that nothing
goes unchecked:

    ```bash                         commands; they must succeed
    ```bash title="fails"           commands, in a subshell; one of them must fail
    ```bash title="setup"           not run: the clone and the environment, which are already here
    ```python title="my_reward.py"  a file, written under that name (with ```bash and ```text if it has a dot)
    ```text title="output"          what the last block of commands printed, standard output and errors together

Each shown line must occur in what was printed, in the order shown; the page may leave lines out. Of two lines,

1. any number matches any number, so `step 2, 13.4 s` is `step 1, 9 s`; words must match; space may be more or less;
2. `…` in a shown line matches any text, for what differs from run to run, such as a model's words: `response: …`;
3. a shown line of `...` or `…` alone only tells the reader that lines are left out.

A reader comes from page 1, which unpacks the demo's model and data into `assets/`. So if a page mentions `assets/` and
does not unpack them itself (`recipes.demo.prepare`), its folder has them from the start. If a page mentions `../slime`,
its folder has the checkout beside it under that name.

All commands of a page share one time limit (`--timeout-s`). Processes that still run at the end of a page are ended.
The files of a page that failed are kept, and with `--keep` all, beside what each block printed (`path-record/<n>.out`).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1200.0
UNPACK = "recipes.demo.prepare"
GRACE_S = 30.0
"""How long the processes of a page may take to end by themselves once they are asked to."""
STOPS = (signal.SIGINT, signal.SIGTERM)

FENCE = re.compile(r"^```")
NUMBER = re.compile(r"(?<![A-Za-z_])[<>]?[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?|\d+")
LEFT_OUT = ("...", "…")


class PageError(Exception):
    """A page that is not as its reader would find it."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    line: int
    """Of its first line of code, from 1."""
    kind: str
    """"commands", "fails", "setup", "output" or "file"."""
    title: str
    """For a file its name."""
    code: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page; raises `PageError` for one that would be neither run, nor written, nor compared."""
    found: list[Block] = []
    lines = page.read_text().split("\n")
    start: int | None = None
    for number, line in enumerate(lines, 1):
        if not FENCE.match(line):
            continue
        if start is None:
            start = number
            continue
        found.append(_block(page, start, lines[start - 1], "".join(f"{code}\n" for code in lines[start : number - 1])))
        start = None
    if start is not None:
        raise PageError(f"{page}, line {start}: this block of code has no end (```)")
    return found


def _block(page: Path, line: int, fence: str, code: str) -> Block:
    match = re.fullmatch(r'```(\w*)(?: title="([^"]+)")?\s*', fence)
    language, title = (match[1], match[2] or "") if match else ("", "")
    kinds = {
        ("bash", ""): "commands",
        ("bash", "fails"): "fails",
        ("bash", "setup"): "setup",
        ("text", "output"): "output",
    }
    kind = kinds.get(
        (language, title), "file" if title and (language not in ("", "bash", "text") or "." in title) else ""
    )
    if not kind:
        raise PageError(
            f"{page}, line {line}: {fence!r} is neither run, nor written, nor compared. Blocks are ```bash, ```bash "
            'title="fails", ```bash title="setup", ```text title="output", or a file, ```python title="name.py".'
        )
    if kind == "file" and (Path(title).is_absolute() or ".." in Path(title).parts):
        raise PageError(f"{page}, line {line}: the file {title} would be outside of the page's folder")
    return Block(line + 1, kind, title, code)


def run_page(page: Path, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Runs a page in `folder`, which is empty. Raises `PageError` with what was shown and what came instead."""
    blocks = blocks_of(page)
    record = folder.with_name(f"{folder.name}-record")
    record.mkdir()
    text = page.read_text()
    if "../slime" in text:
        folder.with_name("slime").symlink_to(ROOT)
    if "assets/" in text and UNPACK not in text:
        # Does nothing if the checkout has them.
        subprocess.run([sys.executable, "-m", f"slime.cli.{UNPACK}"], cwd=ROOT, check=True, capture_output=True)
        (folder / "assets").symlink_to(ROOT / "assets")
    (record / "page.sh").write_text(_script(blocks, record))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    # A signal that came between the start of the shell and its assignment would leave the shell running.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", str(record / "page.sh")],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_heed_stops,
    )
    try:
        _heed_stops()
        code = shell.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(shell)
    for number, block in enumerate(blocks):
        printed = record / f"{number}.out"
        if block.kind not in ("commands", "fails"):
            continue
        if not (record / f"{number}.done").exists():
            raise PageError(_unfinished(page, block, code, timeout_s, _text(printed)))
        shown = [b for b in _shown_after(blocks, number)]
        _compare(page, block, shown, _text(printed))


def _heed_stops() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _script(blocks: list[Block], record: Path) -> str:
    """The page as one program of bash. `<n>.out` gets what block n prints, `<n>.done` says that it went well."""
    parts: list[str] = []
    for number, block in enumerate(blocks):
        out, done = (shlex.quote(str(record / f"{number}.{end}")) for end in ("out", "done"))
        if block.kind == "file":
            copy = record / f"{number}.file"
            copy.write_text(block.code)
            name = shlex.quote(block.title)
            parts.append(f'mkdir -p "$(dirname {name})"\ncp {shlex.quote(str(copy))} {name}')
        elif block.kind == "commands":
            parts.append(f"{{\n{block.code}}} >{out} 2>&1\ntouch {done}")
        elif block.kind == "fails":
            parts.append(f"set +e\n(\nset -e\n{block.code}) >{out} 2>&1\ntest $? -ne 0 || exit 1\ntouch {done}\nset -e")
    return "\n".join([*parts, ""])


def _end(shell: subprocess.Popen[bytes]) -> None:
    """Ends what a page left running: it is asked, and after `GRACE_S` seconds killed."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + wait_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, number)
            while time.monotonic() < until and _alive(shell):
                time.sleep(0.2)


def _alive(shell: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the page runs; one that ended and is not yet collected by its parent does not."""
    shell.poll()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == shell.pid and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _shown_after(blocks: list[Block], number: int) -> Iterator[Block]:
    """The blocks of output that belong to the commands of block `number`."""
    for block in blocks[number + 1 :]:
        if block.kind in ("commands", "fails"):
            return
        if block.kind == "output":
            yield block


def _unfinished(page: Path, block: Block, code: int | None, timeout_s: float, printed: str) -> str:
    if code is None:
        what = f"the page had not ended after {timeout_s:g} s, and was in these commands"
    elif block.kind == "fails":
        what = "these commands succeeded, and the page says that they fail"
    else:
        what = f"these commands failed with exit code {code}"
    return f"{page}, line {block.line}: {what}:\n{_quoted(block.code)}\nThey printed:\n{_quoted(printed)}"


def _compare(page: Path, commands: Block, shown: list[Block], printed: str) -> None:
    """Raises `PageError` if a shown line is not among the printed lines behind the one before it."""
    came = printed.split("\n")
    for block in shown:
        at = 0
        for offset, line in enumerate(block.code.rstrip("\n").split("\n")):
            if not line.strip() or line.strip() in LEFT_OUT:
                continue
            pattern = _pattern(line)
            found = next((n for n in range(at, len(came)) if pattern.fullmatch(_plain(came[n]))), None)
            if found is None:
                nearest = difflib.get_close_matches(_plain(line), [_plain(text) for text in came], 1, 0.3)
                originals = [text for text in came if nearest and _plain(text) == nearest[0]]
                order = " after the shown line before it" if any(pattern.fullmatch(_plain(t)) for t in came) else ""
                raise PageError(
                    f"{page}, line {block.line + offset}: the page shows a line that was not printed{order}.\n"
                    f"  shown:   {line}\n  nearest: {originals[0] if originals else '(nothing like it)'}\n"
                    f"The page shows:\n{_quoted(block.code)}\n"
                    f"The commands on line {commands.line} printed:\n{_quoted(printed)}"
                )
            at = found + 1


def _plain(line: str) -> str:
    """A line without colours, amounts of space, and what its numbers are."""
    return NUMBER.sub("#", " ".join(re.sub(r"\x1b\[[0-9;]*m", "", line).split()))


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in _plain(line).split("…")))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _quoted(text: str, most: int = 150) -> str:
    lines = text.rstrip("\n").split("\n")
    if len(lines) > most:
        lines = [*lines[: most // 3], f"({len(lines) - most} lines left out)", *lines[-2 * most // 3 :]]
    return "\n".join(f"  | {line}" for line in lines)


def main(words: list[str] | None = None) -> int:
    """Runs pages one after the other; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: docs/path/*.md of this checkout")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="time limit of one page (%(default)g)")
    parser.add_argument("--keep", action="store_true", help="keep the files and what was printed of every page")
    given = parser.parse_args(words)
    pages = given.pages or sorted((ROOT / "docs" / "path").glob("*.md"))
    if not pages:
        parser.error(f"there are no pages in {ROOT / 'docs' / 'path'}")
    # What a page left running is ended in any case, also where a shell made this process ignore Ctrl-C.
    for number in STOPS:
        signal.signal(number, signal.default_int_handler)
    failed: list[Path] = []
    for page in pages:
        above = Path(tempfile.mkdtemp(prefix="page-"))
        (folder := above / "path").mkdir()
        began = time.monotonic()
        print(f"{page}: runs in {folder}", flush=True)
        try:
            run_page(page, folder, given.timeout_s)
        except (PageError, OSError, subprocess.CalledProcessError) as error:
            failed.append(page)
            print(
                f"{error}\n{page}: FAILED after {time.monotonic() - began:.0f} s; its files are in {above}", flush=True
            )
        else:
            print(f"{page}: passed in {time.monotonic() - began:.0f} s", flush=True)
            if not given.keep:
                shutil.rmtree(above)
    print(f"{len(pages) - len(failed)} of {len(pages)} pages passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
