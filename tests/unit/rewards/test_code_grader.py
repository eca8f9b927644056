"""The code grader: right programs pass, wrong ones fail, hostile ones reach nothing and leave nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.core.registry import settings_of
from slime.core.sample import Sample
from slime.rewards.graders import make_grader
from slime.rewards.graders.program_tests import ProgramTests, last_program, same_output, same_value
from slime.rewards.pool import GraderPool, code_problems
from slime.rewards.program_sandbox import Ended, Sandbox, missing_here
from slime.rewards.scores import Scored
from slime.settings import parse_args
from tests.support.command_line import complete
from tests.support.marks import quick

SUM = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "-1 1", "output": "0\n"}]


def grade(program: str, tests: Any, **metadata: Any) -> Any:
    response = f"I write\n```python\n{program}\n```\nand that is it."
    return make_grader("code").grade(Sample(response=response, metadata={"tests": tests, **metadata}), 30.0)


def ended(program: str, time_limit_s: float = 1.0) -> Ended:
    with Sandbox(program, time_limit_s=time_limit_s, memory_bytes=1 << 30) as sandbox:
        return sandbox.run({})


def test_the_last_complete_python_block_is_the_answer() -> None:
    assert last_program("```py\none\n```\n```python\ntwo\n```\n```bash\nthree\n```\n```\nopen") == "two\n"
    assert last_program("<think>```\none\n```</think> none") is None
    assert last_program("```\n" * 100_001) is not None
    started = time.process_time()
    assert last_program("```" + "a" * 100_000) is None and last_program("```" + " " * 100_000) is None
    assert time.process_time() - started < 1.0
    assert make_grader("code").grade(Sample(response="print(3)", metadata={"tests": PAIRS}), 30.0) == 0.0


def test_programs_are_run_on_their_inputs() -> None:
    assert grade(SUM, PAIRS) == 1.0
    assert grade(SUM, {"inputs": ["1 2", "-1 1"], "outputs": ["3", "1"]}) == 0.5
    assert grade(SUM, {"inputs": ["1 2", "-1 1"], "outputs": ["3", "1"]}, code_reward="all") == 0.0
    assert grade("print(3); raise SystemExit(1)", PAIRS[:1]) == 0.0
    assert grade("syntax error", PAIRS[:1]) == 0.0


def test_functions_are_called_and_their_values_compared_outside() -> None:
    tests = {"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], []], "fn_name": "order"}
    assert grade("def order(x): return tuple(sorted(x))", tests) == 1.0
    assert grade("class Solution:\n    def order(self, x): return sorted(x)", tests) == 1.0
    assert grade("def order(x): return x", tests) == 0.5
    always = "class Yes(list):\n    def __eq__(self, other): return True\ndef order(x): return Yes([0])"
    assert grade(always, tests) == 0.0
    assert grade("import os\nos._exit(0)", {"inputs": [[1]], "outputs": [None], "fn_name": "f"}) == 0.0


def test_assertions_hold_or_do_not() -> None:
    tests = ["assert double(2) == 4", "assert double(0) == 0"]
    assert grade("def double(x): return 2 * x", tests) == 1.0
    assert grade("def double(x): return x", tests) == 0.5
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert grade("def double(x): return 2 * x", check, entry_point="double") == 1.0
    for texts in ([check], ["LARGE = 10**9", check + "    assert candidate(LARGE) == 2 * LARGE\n"]):
        assert grade("def double(x): return 2 * x", texts, entry_point="double") == 1.0
        assert grade("def double(x): return x", texts, entry_point="double") == 0.0


@pytest.mark.parametrize(
    ("tests", "metadata", "said"),
    [
        *(
            (tests, {}, "have an unknown format")
            for tests in (None, [], "", {"inputs": [1], "outputs": []}, [{"input": 1}])
        ),
        ("[not json", {}, "not valid JSON"),
        (PAIRS, {"code_reward": "some"}, "code_reward"),
        (["assert f(1"], {}, "not valid Python"),
        (["x = 1", "assert x == 1"], {}, "do not use the program"),
        ("def check(candidate):\n    assert candidate(1)", {}, "do not use the program"),
        ("assert f(1)", {"entry_point": "f"}, "do not define check"),
        (["import math\nassert f(math)"], {}, "passes a module to the program"),
    ],
)
def test_rows_that_cannot_be_tested_are_errors_not_zeros(tests: Any, metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        grade("def f(x): return x", tests, **metadata)


def test_outputs_are_compared_as_people_would() -> None:
    assert same_output("1 \n2\n\n", "1\n2") and same_output("0.3333333333", "0.33333333") and same_output("a  b", "a b")
    assert not same_output("12", "1 2") and not same_output("3.0", "3") and not same_output("", "0")
    assert not same_value([10**400], [1.5]) and not same_value(10**400, float("inf"))
    assert same_value([1, [0.1 + 0.2]], [1, [0.3]]) and not same_value(True, 1) and not same_value([1], [1, 2])


FORBID = """
import ctypes, json, platform, struct, sys
unshare = {"x86_64": 272, "aarch64": 97}[platform.machine()]
forbidden = {"namespaces": unshare, "Landlock": 444}
names = sys.argv[1].split(",")
filters = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # the number of the call
for name in names:
    filters += [struct.pack("HBBI", 0x15, 0, 1, forbidden[name]), struct.pack("HBBI", 0x06, 0, 0, 0x00050001)]  # EPERM
filters += [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(filters))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(filters), ctypes.addressof(code)))) == 0, ctypes.get_errno()

from slime.core.errors import Unconfined
from slime.rewards.program_sandbox import Sandbox, missing_here
from slime.cli.doctor import check_sandbox

def run(program, **allowed):
    with Sandbox(program, time_limit_s=2.0, memory_bytes=1 << 30, **allowed) as sandbox:
        return sandbox.run({})

try:
    run(f"open({sys.argv[2]!r}, 'w').write('ran')")
    refused = None
except Unconfined as error:
    refused = str(error)
from collections.abc import Sequence
from pathlib import Path
ran = Path(sys.argv[2]).exists()
allowed = run("print('ran')", allow_unconfined=True)
finding = check_sandbox()
print(json.dumps([refused, ran, allowed.output, allowed.missing, missing_here(), finding.state, finding.detail]))
"""
"""A machine as a container's seccomp profile makes it: these calls are forbidden."""


@pytest.mark.parametrize(
    "names", quick([["namespaces"], ["Landlock"], ["namespaces", "Landlock"]], ["namespaces", "Landlock"])
)
def test_what_cannot_be_held_is_not_run_unless_that_is_allowed(names: list[str], tmp_path: Path) -> None:
    """Law: without namespaces or Landlock no program starts; the refusal names what is missing, and the way out."""
    trace = tmp_path / "trace"
    done = subprocess.run(
        [sys.executable, "-c", FORBID, ",".join(names), str(trace)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, ran, output, missing, here, state, detail = json.loads(done.stdout)
    assert refused is not None and not ran and output == "ran\n"
    assert set(names) <= set(missing) and missing == here
    for name in names:
        assert name in refused and name in detail
    assert "--allow-unconfined-code" in refused and state == "warn"


def test_the_flag_reaches_the_sandbox(tmp_path: Path) -> None:
    """Law: `--allow-unconfined-code` is a setting of the grader, for runs that name it and for rows that do."""
    for rm_type in ("code", "math"):
        words = [*complete(tmp_path / rm_type), "--rm-type", rm_type]
        row = '{"input": "1+1", "label": "2", "metadata": {"rm_type": "code"}}'
        (tmp_path / rm_type / "data.jsonl").write_text(row + "\n")
        assert settings_of(ProgramTests, parse_args(words)) == {"allow_unconfined_code": False}
        allowed = parse_args([*words, "--allow-unconfined-code"])
        assert settings_of(ProgramTests, allowed) == {"allow_unconfined_code": True}
        if not missing_here():
            assert code_problems(parse_args(words)) == []


@pytest.mark.slow
def test_sleeping_through_the_tests_is_failing_them() -> None:
    """Law: a program cannot leave its tests unjudged by taking the time of all of them."""
    tests = {"inputs": ["0", *["3600"] * 7], "outputs": ["1"] * 8}
    program = "```\nimport time\ntime.sleep(float(input()))\nprint(1)\n```"
    limits_s = (2.0, 10.0, 50.0)  # a busy machine may need more than the first for the one test that passes
    scores = (ProgramTests().grade(Sample(response=program, metadata={"tests": tests}), limit) for limit in limits_s)
    assert next(filter(None, scores), 0.0) == 1 / 8


def test_a_sandbox_that_fails_is_no_verdict() -> None:
    """Law: what did not run is an error of the machine, never a program that failed."""

    class Broken(Sandbox):
        def _ask(self, folder: str, roles: Sequence[str]) -> dict[str, Any]:
            Path(self._folder.name, folder, "stdin").unlink()
            return super()._ask(folder, roles)

    sandbox = Broken("print(1)", time_limit_s=1.0, memory_bytes=1 << 30)
    with sandbox, pytest.raises(OSError, match="could not start a program"):
        sandbox.run({})


BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint(1)"
CROWD = (
    "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(12):\n    if os.fork() == 0:\n"
)
CROWD += "        while True: pass\n"


@pytest.mark.slow
def test_a_busy_machine_fails_no_program_and_a_program_cannot_make_it_busy() -> None:
    """Law: the clock of a program stands still while it waits for a processor that others use, not while its own do.

    All on one core: the program needs half a second of it, among twelve that never stop.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
        busy = ended(BUSY, 0.8)
        for other in others:
            other.kill()
            other.wait()
        own = ended(CROWD + BUSY, 0.8)
    finally:
        os.sched_setaffinity(0, cores)
    assert busy.output == "1\n" and not busy.timed_out and busy.own_s < 2.6, busy
    assert own.timed_out and own.output == "", own


@pytest.mark.slow
def test_a_slow_program_fails_and_is_not_asked_again() -> None:
    started = time.monotonic()
    slow = "n = int(input())\nwhile n: pass\nprint(n)"
    assert grade(slow, {"inputs": ["0", "1", "1", "1"], "outputs": ["0"] * 4}, time_limit_s=1) == 0.25
    assert time.monotonic() - started < 20
    assert ended("import time; time.sleep(60)", 0.2).timed_out


@pytest.mark.parametrize(
    "attack",
    [
        "x = 'a' * (8 << 30)",
        "open('/etc/passwd')",
        "import os; os.listdir('/proc/1')",
        "open('/tmp/slime-code-escaped', 'w'); print(1 / 0)",
        "import os; os.kill(os.getppid(), 9); print(1 / 0)",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x40000000) == 0",
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
    ],
)
def test_an_attack_reaches_nothing(attack: str) -> None:
    if missing := missing_here():
        pytest.skip(f"nothing holds a program on this machine: {missing}")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = attack.replace("PORT", str(server.getsockname()[1]))
        assert ended(program).code != 0
    assert not Path("/tmp/slime-code-escaped").exists()


HONEST = """
import asyncio, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pool, Process, Queue, shared_memory
import numpy as np

def put(queue):
    queue.put(5)

queue = Queue()
process = Process(target=put, args=(queue,))
process.start()
with Pool(2) as pool, ThreadPoolExecutor(8) as threads, tempfile.NamedTemporaryFile() as file:
    print(pool.map(abs, [-1, -2]), queue.get(), list(threads.map(abs, [-3])), file.write(b"x"))
process.join()
memory = shared_memory.SharedMemory(create=True, size=1 << 20)
memory.buf[0] = 4
print(memory.buf[0], asyncio.run(asyncio.sleep(0, 6)), int(np.eye(7).sum()))
memory.close()
memory.unlink()
print(subprocess.run([sys.executable, "-c", "print(8)"], capture_output=True, text=True).stdout)
"""


def test_honest_programs_have_what_they_need() -> None:
    """Law: threads, processes that share memory, temporary files and other programs work within the limits."""
    assert ended(HONEST, 10.0).output.split() == ["[1,", "2]", "5", "[3]", "1", "4", "6", "7", "8"]


BOUNDS = """
import os, resource, signal
names = ("CORE", "CPU", "AS", "FSIZE", "NPROC", "NOFILE")
print({name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names}, flush=True)
def until_refused(act, most):
    kept = []
    try:
        while len(kept) < most: kept.append(act())
    except (OSError, MemoryError) as refusal:
        print(type(refusal).__name__, len(kept) <= most // 2, flush=True)
def another():
    if not (child := os.fork()): signal.pause()
    return child
until_refused(lambda: os.open("/dev/null", 0), 128)
until_refused(lambda: bytes(1 << 28), 8)  # address space only: no page is touched
until_refused(another, 64)
"""
"""A program that takes of each thing twice what it may have, and says where it was refused."""


def test_a_program_has_so_much_of_everything_and_no_more() -> None:
    """Law: the kernel itself says so, of processes too, for no program is root's."""
    limits = {"CORE": 0, "CPU": 20, "AS": 1 << 30, "FSIZE": 4 << 20, "NPROC": 32, "NOFILE": 64}
    refused = ["OSError True", "MemoryError True", "BlockingIOError True"]
    run = ended(BOUNDS, 20.0)
    lines = [str({name: (value, value) for name, value in limits.items()}), *refused]
    assert run.output.splitlines() == lines, run


def test_output_and_files_are_bounded_and_the_tree_is_gone() -> None:
    flood = ended("print('x' * 50_000_000)", 4.0)
    assert flood.code != 0 and len(flood.output) <= 4 * 1024 * 1024
    marker = f"slime-orphan-{os.getpid()}"
    orphan = (
        f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        open('{marker}', 'w')"
    )
    assert ended(orphan + "\n        time.sleep(300)", 10.0).code == 0
    crowd = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(300)\ntime.sleep(300)"
    assert ended(crowd, 0.2).code != 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert "program_sandbox.py" not in (folder / "cmdline").read_text() or not is_ours(folder), folder
        except OSError:
            continue


def is_ours(folder: Path) -> bool:
    return f"\0{os.getpid()}\0" in (folder / "cmdline").read_text()


TRACES = """
import ctypes, os, signal, socket, sys, time
def heard():
    try:
        socket.socket(socket.AF_UNIX).connect("\\0slime-test")
        return True
    except OSError:
        return False
memory = ctypes.CDLL(None).shmget(1234, 4096, 0)
print(os.listdir("."), heard(), memory, flush=True)
open("mark", "w").close()
ctypes.CDLL(None).shmget(1234, 4096, 0o1600)
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind("\\0slime-test")
        server.listen()
    except OSError:
        pass
    os.write(tell, b"x")
    while True:
        time.sleep(0.01)
        os.kill(-1, signal.SIGWINCH)
os.read(ready, 1)
"""
"""A program that leaves what it can: a file, shared memory, a process that listens and signals all that it may."""


def test_no_test_of_a_program_meets_what_another_left() -> None:
    """Law: every test runs as if it were the first: one cannot change the verdict of another."""
    if missing := missing_here():
        pytest.skip(f"nothing holds a program on this machine: {missing}")
    assert grade(TRACES, {"inputs": [""] * 4, "outputs": ["[] False -1"] * 4}) == 1.0
    dies_once = "import os\nif input() == 'die':\n    os.kill(0, 9)\nprint(1)"
    assert grade(dies_once, {"inputs": ["go", "die", "go", "die", "go"], "outputs": ["1"] * 5}) == 0.6


def through_the_pool(program: str, tests: Any, *, timeout_s: float) -> Any:
    async def main() -> Any:
        pool = GraderPool(num_workers=1, timeout_s=timeout_s, rm_type="code", memory_limit_bytes=2 << 30)
        try:
            return await pool.score(Sample(response=f"```python\n{program}\n```", metadata={"tests": tests}))
        finally:
            await pool.close()

    return asyncio.run(main())


def test_through_the_pool() -> None:
    assert through_the_pool(SUM, PAIRS, timeout_s=30.0) == Scored(1.0)


@pytest.mark.slow
def test_the_number_of_tests_leaves_no_answer_unscored() -> None:
    """Law: what all tests together may take grows with their number, so a right answer is scored as a wrong one is."""
    tests = {"inputs": [f"{i} 1" for i in range(1000)], "outputs": [str(i + 1) for i in range(1000)]}
    assert through_the_pool(SUM, tests, timeout_s=10.0) == Scored(1.0)
    assert through_the_pool("print(0)", tests, timeout_s=10.0) == Scored(0.0)


PROBE = """
import sys
from slime.rewards.program_sandbox import Sandbox
program = "import tempfile; open(tempfile.mkstemp()[1], 'w').write('x')"
with Sandbox(program, time_limit_s=20, memory_bytes=1 << 30) as one:
    ended = one.run({})
print(ended.missing, ended.code)
"""


def test_a_virtual_environment_in_the_temporary_folder_can_confine(tmp_path: Path) -> None:
    """Law: programs have a temporary folder of their own even if Python's packages are in /tmp."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [tmp_path / "env" / "bin" / "python", "-c", PROBE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[-2] == "() 0", ran.stdout + ran.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="programs run as this user")
def test_an_environment_that_other_users_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: with a strict umask, the message says what to do instead of blaming the load."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(OSError, match=f"another user, who cannot read {tmp_path}; run: chmod -R"):
        ended("print(1)")
