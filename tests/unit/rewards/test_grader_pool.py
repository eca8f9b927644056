"""The grader pool: whatever a grader does, the answer is a score or a reason, and the next sample is graded.

A machine that is busy fails none of these: a limit by the clock that is to expire is met by what never ends, and what
is to be scored has a limit beyond that of the test, or is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError, SlimeError
from slime.core.sample import Sample
from slime.rewards import grader_process
from slime.rewards import pool as pool_module
from slime.rewards.grader_confinement import FEW_THREADS, grader_environment, is_formula
from slime.rewards.pool import GraderPool
from slime.rewards.program_sandbox import missing_here
from slime.rewards.scores import Score, Scored, Unscored
from slime.rollout.factories import grader_pool
from slime.settings import parse_args
from slime.settings.all_flags import flag_table
from tests.support.command_line import complete
from tests.support.marks import quick
from tests.unit.rewards import hostile
from tests.unit.rewards.hostile import NUM_TOGETHER

HOSTILE = str(Path(__file__).with_name("hostile.py"))
HOSTILE_GRADER = str(Path(__file__).with_name("hostile_grader.py"))


def with_pool(work: Callable[[GraderPool], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        pool = GraderPool(**{"num_workers": 2, "timeout_s": 600.0, "memory_limit_bytes": 2 << 30, **settings})
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


async def in_the_end(pool: GraderPool, sample: Sample) -> Score:
    """The score of a sample that is asked again while the machine keeps its grader beyond the limit."""
    while isinstance(score := await pool.score(sample), Unscored) and score.reason.startswith("timeout"):
        pass
    return score


async def given_up(*tasks: asyncio.Task[Score]) -> None:
    """Ends gradings that hang still."""
    assert not any(task.done() for task in tasks), "it waited for the limit of another"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def processor_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock no grader that computes is given up, so that a busy machine is no reason."""
    monkeypatch.setattr(grader_process, "WALL_FACTOR", 1e6)


def test_a_grader_has_the_limits_of_the_settings_and_a_dead_one_is_asked_twice(tmp_path: Path) -> None:
    """Law: of memory what the flag says, of a file 64 MB, no core; what ended its process twice is not graded."""
    args = parse_args(
        [*complete(tmp_path), "--custom-rm-path", f"{HOSTILE}:limits", "--reward-memory-limit-mb", "3000"]
    )
    deaths = tmp_path / "deaths"

    async def main() -> None:
        pool = grader_pool(args)
        try:
            limits = {"AS": 3000.0 * 2**20, "FSIZE": 64.0 * 2**20, "CORE": 0.0}
            assert await pool.score(Sample()) == Scored(limits)
            dead = await pool.score(Sample(metadata={"file": str(deaths)}))
            assert isinstance(dead, Unscored) and "died while grading" in dead.reason and deaths.read_text() == "xx"
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.slow
def test_hostile_graders_cost_their_sample_only() -> None:
    acts = ["raise", "none", "nan", "huge", "memory", "exit", "garbage"]

    async def work(pool: GraderPool) -> None:
        for act in acts:
            bad, good = await asyncio.gather(pool.score(Sample(response=act)), pool.score(Sample(response="ok")))
            assert isinstance(bad, Unscored) and bad.reason, act
            assert good == Scored(1.0), act
        assert await pool.score(Sample(response="print")) == Scored(1.0)
        assert await pool.score(Sample(response="args")) == Scored(7.0)

    with_pool(work, custom_rm_path=f"{HOSTILE}:act", args={"seven": 7})


def test_what_a_function_notes_in_the_metadata_comes_back_with_a_score_and_without() -> None:
    """Law: a judge's words are kept, most of all when they were no score; what cannot be kept is said, not dropped."""

    async def work(pool: GraderPool) -> None:
        row = {"level": [1]}
        assert await pool.score(Sample(response="7", metadata=row)) == Scored(7.0, metadata={**row, "judge": "7"})
        nonsense = await pool.score(Sample(response="well", metadata=row))
        assert isinstance(nonsense, Unscored) and nonsense.metadata == {**row, "judge": "well"}
        for response, why in {"unkeepable": "set is not JSON serializable", "endless": "more than 65536"}.items():
            lost = await pool.score(Sample(response=response))
            assert isinstance(lost, Unscored) and why in lost.reason and lost.metadata is None, lost

    with_pool(work, custom_rm_path=f"{HOSTILE}:judge", num_workers=1)

    async def together(pool: GraderPool) -> None:
        scores = await pool.score_group([Sample(response="1"), Sample(response="2")])
        assert scores == [Scored(0.0), Scored(2.0, metadata={"judge": "2"})]

    with_pool(together, custom_rm_path=f"{HOSTILE}:judge_all", num_workers=1)


@pytest.mark.parametrize("num", [0, 5, 40_000])
def test_a_function_sees_the_sample_with_all_its_fields_and_their_numbers_travel_as_arrays(num: int) -> None:
    """Law: however long an answer is, its tokens are no JSON on the way, and the function reads ordinary lists."""
    sample = Sample(index=1, group_index=2, prompt=[{"role": "user", "content": "é"}], tokens=[5] * 3, label={"a": 1})
    sample.append_response_tokens(
        [i * 7919 % 151_936 for i in range(num)],
        log_probs=[-i / 1024 for i in range(num)],
        weight_version=[3 + i // 100 for i in range(num)],
    )
    sample.append_response_tokens([7, 8, 9])
    sample.teacher_log_probs, sample.extra = [0.1] * sample.response_length, "of my own"
    want = hostile.show(None, Sample.from_dict(json.loads(sample.to_json())))
    sent = list[int]()

    async def work(pool: GraderPool) -> None:
        assert await pool.score(sample) == Scored(want)
        message = {"samples": [pool_module._wire(sample, with_tokens=True)]}
        frame = grader_process.encoded(message)
        sent.extend((grader_process.HEADER.unpack_from(frame)[0], len(frame)))

    with_pool(work, custom_rm_path=f"{HOSTILE}:show", num_workers=1)
    assert sent[0] < 2500 and sent[1] < 2500 + num * (4 + 4 + 8 + 1), "teacher_log_probs take 8 bytes"


@pytest.mark.parametrize("function", quick(["act", "act_async"], "act"))
def test_what_ends_processes_ends_one_grading(function: str) -> None:
    """Law: the reason says what was raised, and the process grades on, beside others if it grades several."""
    raised = {"leave": "SystemExit: as told", "interrupt": "KeyboardInterrupt: as told", "cancel": "CancelledError"}

    async def work(pool: GraderPool) -> None:
        lane = pool._serial if function == "act" else pool._concurrent
        await pool.score(Sample(response="ok"))
        pids = [process.pid for process in lane.processes]
        scores = await asyncio.gather(*(pool.score(Sample(response=text)) for text in (*raised, "ok")))
        for score, said in zip(scores, raised.values(), strict=False):
            assert isinstance(score, Unscored) and said in score.reason and "hostile.py" in score.reason, score
        assert isinstance(scores[-1], Scored) and [process.pid for process in lane.processes][:1] == pids

    with_pool(work, custom_rm_path=f"{HOSTILE}:{function}", num_workers=1)


@pytest.mark.parametrize("act", quick(["flood", "heir"], "flood"))
def test_a_process_whose_pipe_stays_open_is_gone_at_once(act: str, tmp_path: Path) -> None:
    """Unread output, or a child that left the group and holds the pipe, once made the end of the process wait."""
    heir, over = tmp_path / "heir", tmp_path / "over"
    bad = Sample(response=act, metadata={"heir": str(heir), "over": str(over)})

    async def work(pool: GraderPool) -> None:
        await in_the_end(pool, Sample(response="ok"))
        assert isinstance(await pool.score(bad), Unscored)
        while act == "heir" and not heir.exists():  # the limit came before the child
            await pool.score(bad)
        assert await in_the_end(pool, Sample(response="ok")) == Scored(1.0)

    try:
        with_pool(work, custom_rm_path=f"{HOSTILE}:act", num_workers=1, timeout_s=1.0)
    finally:
        over.touch()  # the heir lives until now


@pytest.mark.parametrize("act", quick(["hang", "stuck"], "hang"))
def test_a_hang_is_unscored_after_the_limit_and_others_go_on(act: str) -> None:
    async def beside(pool: GraderPool) -> None:
        await pool.score(Sample(response="ok"))
        hang = asyncio.create_task(pool.score(Sample(response=act)))
        assert all([await pool.score(Sample(response="ok")) == Scored(1.0) for _ in range(20)])
        await given_up(hang)

    async def alone(pool: GraderPool) -> None:
        assert await pool.score(Sample(response=act)) == Unscored("timeout after 1 s")
        assert await in_the_end(pool, Sample(response="ok")) == Scored(1.0)

    with_pool(beside, custom_rm_path=f"{HOSTILE}:act")
    with_pool(alone, custom_rm_path=f"{HOSTILE}:act", timeout_s=1.0)


@pytest.mark.slow
def test_blocked_user_threads_keep_no_grading() -> None:
    """Law: gradings are done while users' code holds every thread that the event loop has for it, and more wait."""

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="x", label="x"))
        done, loop = threading.Event(), asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(4))
        users = [loop.run_in_executor(None, done.wait) for _ in range(40)]
        try:
            scores = await asyncio.gather(*(pool.score(Sample(response="x", label="x")) for _ in range(20)))
        finally:
            done.set()
        assert scores == [Scored(1.0)] * 20 and all(await asyncio.gather(*users))

    with_pool(work, rm_type="exact_match", timeout_s=10.0)


@pytest.mark.slow
def test_the_clock_starts_with_the_grader() -> None:
    """Law: the time before the process takes the request is not the grader's."""

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="ok"))
        (process,) = pool._serial.processes
        os.kill(process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(pool.score(Sample(response="ok")))
        await asyncio.sleep(6)
        os.kill(process.pid, signal.SIGCONT)
        assert await asked == Scored(1.0) and pool._serial.processes == [process]

    with_pool(work, custom_rm_path=f"{HOSTILE}:act", num_workers=1, timeout_s=5.0)


@pytest.mark.slow
def test_so_many_blocking_calls_run_as_there_are_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: `--reward-num-workers` is what a function that blocks has under way; by default it follows the cores."""

    async def work(pool: GraderPool) -> None:
        shared = {"folder": str(tmp_path / "meet"), "num": 4}
        samples = [Sample(index=i, response="meet", metadata=shared) for i in range(4)]
        assert await asyncio.gather(*map(pool.score, samples)) == [Scored(1.0)] * 4
        assert len(pool._serial.processes) == 4 and pool._serial.max_processes == 4

    (tmp_path / "meet").mkdir()
    with_pool(work, custom_rm_path=f"{HOSTILE}:act", num_workers=4)
    words = complete(tmp_path)
    for cores, expected in ((1, 4), (2, 4), (16, 16), (256, 64)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert parse_args(words).reward_num_workers == expected
    assert parse_args([*words, "--reward-num-workers", "7"]).reward_num_workers == 7


def test_async_graders_that_block_in_threads_run_side_by_side() -> None:
    async def work(pool: GraderPool) -> None:
        samples = [Sample(response="ok") for _ in range(NUM_TOGETHER)]
        assert await asyncio.gather(*map(pool.score, samples)) == [Scored(1.0)] * NUM_TOGETHER

    with_pool(work, custom_rm_path=f"{HOSTILE}:act_in_thread", num_workers=1)


def test_async_graders_run_side_by_side_and_hang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: those meet that wait for one another, beside one that hangs; and its limit costs no process."""
    monkeypatch.setattr(pool_module, "ASYNC_GRACE_S", 600.0)

    async def beside(pool: GraderPool) -> None:
        hang = asyncio.create_task(pool.score(Sample(response="hang")))
        scores = await asyncio.gather(*(pool.score(Sample(response="meet")) for _ in range(NUM_TOGETHER)))
        assert scores == [Scored({"score": 0.5})] * NUM_TOGETHER
        await given_up(hang)

    async def alone(pool: GraderPool) -> None:
        assert await pool.score(Sample(response="hang")) == Unscored("timeout after 1 s")
        (process,) = pool._concurrent.processes
        assert await in_the_end(pool, Sample(response="ok")) == Scored({"score": 0.5})
        assert pool._concurrent.processes == [process]

    with_pool(beside, custom_rm_path=f"{HOSTILE}:act_async", num_workers=1)
    with_pool(alone, custom_rm_path=f"{HOSTILE}:act_async", timeout_s=1.0, num_workers=1)


@pytest.mark.slow
def test_a_blocking_async_grader_costs_its_process_not_its_neighbours() -> None:
    async def work(pool: GraderPool) -> None:
        scores = await asyncio.gather(*(pool.score(Sample(response=r)) for r in ["ok"] * 5 + ["block"] + ["ok"] * 5))
        assert scores[5] == Unscored("timeout after 2 s")
        assert scores[:5] + scores[6:] == [Scored({"score": 0.5})] * 10

    with_pool(work, custom_rm_path=f"{HOSTILE}:act_async", timeout_s=2.0, num_workers=1)


@pytest.mark.slow
def test_a_slow_request_lets_others_go_before_it() -> None:
    async def work(pool: GraderPool) -> None:
        hangs = [asyncio.create_task(pool.score(Sample(response="hang"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert await pool.score(Sample(response="ok")) == Scored(1.0)
        await given_up(*hangs)
        assert pool._serial.num_slow == 0

    with_pool(work, custom_rm_path=f"{HOSTILE}:act", num_workers=1)


@pytest.mark.parametrize("where", quick(["response", "prompt", "label", "metadata"], "response"))
def test_no_giant_text_travels_to_a_grader(where: str) -> None:
    giant = "x" * 20_000_000
    fields: dict[str, Any] = {where: {"deep": [giant]} if where == "metadata" else giant}

    async def work(pool: GraderPool) -> None:
        score = await pool.score(Sample(**fields))
        if where == "response":
            assert isinstance(score, Scored) and score.value == 0.0 and "too long" in score.ungradable, score
        else:
            assert isinstance(score, Unscored) and "too long" in score.reason
        assert not pool._held.processes, "a process was started for it"

    with_pool(work, rm_type="exact_match")


@pytest.mark.slow
def test_many_hangs_do_not_stop_the_others() -> None:
    async def work(pool: GraderPool) -> None:
        responses = ["hang" if i % 20 == 0 else "ok" for i in range(100)]
        hang, ok = Sample(response="hang"), Sample(response="ok")
        work = (pool.score(hang) if response == "hang" else in_the_end(pool, ok) for response in responses)
        for response, score in zip(responses, await asyncio.gather(*work), strict=True):
            assert score == (Unscored("timeout after 4 s") if response == "hang" else Scored(1.0))

    with_pool(work, custom_rm_path=f"{HOSTILE}:act", timeout_s=4.0)


MONSTERS = [
    "9**9**9",
    "9999999!",
    "2**2**2**2**2**2",
    "(" * 5000,
    "\\frac" * 3000,
    "\\sum_{n=1}^{1000000} \\frac{1}{n^2}",
]


@pytest.mark.usefixtures("processor_time_alone")
@pytest.mark.parametrize("answer", quick(MONSTERS, MONSTERS[0]))
@pytest.mark.slow
def test_a_monstrous_answer_stalls_nothing_and_is_a_wrong_one(answer: str) -> None:
    """Law: an answer cannot evade its penalty by being too much for its grader, and costs no other its score."""

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="\\boxed{4}", label="5"))
        monster = asyncio.create_task(pool.score(Sample(response=f"\\boxed{{{answer}}}", label="x+1")))
        for _ in range(10):
            busy = time.thread_time()
            await asyncio.sleep(0.01)
            assert time.thread_time() - busy < 0.5, "the event loop stalled"
            assert await pool.score(Sample(response="so \\boxed{\\frac{1}{2}}", label="0.5")) == Scored(1.0)
        assert await monster in (Scored(0.0), Scored(0.0, ungradable=TIMEOUT))

    with_pool(work, rm_type="math", timeout_s=1.0)


TIMEOUT = "timeout after 1 s of CPU time"
DOINGS = {  # what is done -> what is said if the answer did it, and if the row did, or the machine
    "burn": (TIMEOUT, TIMEOUT),
    "memory": ("the grader ran out of memory", "the grader ran out of memory"),
    "recurse": ("the grader ran out of stack", "the grader ran out of stack"),
    "raise": ("the grader raised ValueError", "the grader raised ValueError"),
    "segfault": ("died while grading", "died while grading"),
    "nan": ("the grader returned nan", None),
    "killed": (None, "died while grading"),
    "not of the answer": (None, "no space left on device"),
    "row": (None, "got a row without tests"),
}


OUTLIVED = ("raise", "nan", "row")
"""No process ends of them, which takes a second each."""


@pytest.mark.usefixtures("processor_time_alone")
@pytest.mark.parametrize("doings", quick([(OUTLIVED,), (tuple(DOINGS),)], (OUTLIVED,)), ids=len)
def test_a_failure_is_blamed_on_the_answer_only_if_the_answer_is_to_blame(doings: tuple[str, ...]) -> None:
    """Law: what an answer does to a grader that computes costs it the reward; a row, a label or a machine that fails is
    no reward at all, whatever the answer."""

    async def work(pool: GraderPool) -> None:
        of_answers = [Sample(response=doing) for doing in doings]
        of_rows = [Sample(response="fine", metadata={"row": doing}) for doing in doings]
        scores = await asyncio.gather(*map(pool.score, of_answers + of_rows))
        answers, rows = scores[: len(doings)], scores[len(doings) :]
        for doing, answer, row in zip(doings, answers, rows, strict=True):
            by_answer, by_others = DOINGS[doing]
            if by_answer is not None:
                assert isinstance(answer, Scored) and answer.value == -2.0, (doing, answer)
                assert by_answer in answer.ungradable, (doing, answer)
            else:
                assert isinstance(answer, Unscored) and str(by_others) in answer.reason, (doing, answer)
            if by_others is not None:
                assert isinstance(row, Unscored) and by_others in row.reason, (doing, row)
        assert await pool.score(Sample(response="fine")) == Scored(1.0)

    with_pool(work, rm_type=HOSTILE_GRADER, timeout_s=1.0)


def test_a_machine_that_gives_no_processor_is_not_the_answers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the limit of a grader that computes is processor time. A stopped one is waited for and then scored; one that
    gets none in `WALL_FACTOR` times its limit leaves its sample unscored."""
    monkeypatch.setattr(grader_process, "WALL_FACTOR", 4.0)

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="fine"))
        (worker,) = pool._offline.processes
        stalled = asyncio.create_task(pool.score(Sample(response="sleep")))
        started = time.monotonic()
        score = await stalled
        assert score == Unscored("timeout after 2 s (0.0 s of CPU time)")
        assert time.monotonic() - started >= 2.0 and worker.dead

    with_pool(work, rm_type=HOSTILE_GRADER, num_workers=1, timeout_s=0.5)


@pytest.mark.usefixtures("processor_time_alone")
@pytest.mark.slow
def test_ungradable_answers_may_be_left_unscored() -> None:
    async def work(pool: GraderPool) -> None:
        assert await pool.score(Sample(response="burn")) == Unscored(TIMEOUT)

    with_pool(work, rm_type=HOSTILE_GRADER, timeout_s=1.0, ungradable_is_wrong=False)


@pytest.mark.usefixtures("processor_time_alone")
@pytest.mark.slow
def test_a_label_that_takes_too_long_costs_no_answer_its_reward() -> None:
    """Law: the label is read, and once compared, before any answer is looked at."""

    async def work(pool: GraderPool) -> None:
        monster = Sample(response="\\boxed{4}", label="\\sum_{n=1}^{1000000} \\frac{1}{n^2}")
        assert await pool.score(monster) == Unscored(TIMEOUT)

    with_pool(work, rm_type="math", timeout_s=1.0)


def test_group_graders_return_one_reward_per_sample() -> None:
    async def work(pool: GraderPool) -> None:
        pair = [Sample(response="a"), Sample(response="abc")]
        assert await pool.score_group(pair) == [Scored(1.0), Scored(3.0)]
        short = await pool.score_group([*pair, Sample(response="")])
        assert all(isinstance(s, Unscored) and "expected 3" in s.reason for s in short) and len(short) == 3

    with_pool(work, custom_rm_path=f"{HOSTILE}:group")


def test_graders_see_no_secret_that_is_not_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SLIME_REWARD_ENV", "JUDGE_KEY")

    async def work(pool: GraderPool) -> Any:
        return await pool.score(Sample(response="environment"))

    seen = with_pool(work, custom_rm_path=f"{HOSTILE}:act")
    assert seen == Scored({"PATH": 1.0, "WANDB_API_KEY": 0.0, "HF_TOKEN": 0.0, "JUDGE_KEY": 1.0})


def test_a_function_finds_no_secret_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of the settings a user's function gets all but the secrets; whatever flag or variable held one."""
    secret = "hunter2-hunter2"
    given: list[str] = ["--use-wandb", "--train-env-vars", json.dumps({"WANDB_API_KEY": secret})]
    usual = complete(tmp_path)
    for flag in (flag for flag in flag_table().flags if flag.secret):
        with contextlib.suppress(ConfigError):  # slime sets it itself
            parse_args([*usual, flag.names[0], secret])
            given += [flag.names[0], secret]
    assert len(given) > 6 and "--wandb-key" in given and "--sglang-api-key" in given, given
    args = parse_args([*usual, *given])
    assert secret.encode() in pickle.dumps(args), "there is something to find"
    names = ["WANDB_API_KEY", "HF_TOKEN", "HF_API_KEY", "RAY_AUTH_TOKEN", "OMP_SECRET", "AWS_SECRET_ACCESS_KEY"]
    for name in names:
        monkeypatch.setenv(name, secret)

    async def work(pool: GraderPool) -> Any:
        return await pool.score(Sample(response="search", metadata={"text": secret}))

    seen = with_pool(work, custom_rm_path=f"{HOSTILE}:act", args=args)
    assert seen == Scored({"args": 0.0, "seen": 1.0, "environment": 0.0})


def test_the_environment_of_a_grader_is_a_short_list() -> None:
    full = {
        "HOME": "h",
        "LC_ALL": "C",
        "HF_HOME": "x",
        "HF_TOKEN": "s",
        "RAY_AUTH_TOKEN": "s",
        "https_proxy": "p",
        "SLIME_RUN_ID": "r",
        "KEY": "k",
        "SLIME_REWARD_ENV": "KEY",
    }
    threads = set(FEW_THREADS)
    common = {"HOME", "LC_ALL", "HF_HOME", "SLIME_RUN_ID"} | threads
    assert set(grader_environment(full, offline=True)) == common
    assert set(grader_environment(full, offline=False)) == common | {"https_proxy", "KEY"}


def test_built_in_graders_have_no_network_where_the_kernel_permits() -> None:
    code = "from slime.core import confine; print(confine.leave(confine.NEW_NETWORK) is not None)"
    permitted = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="x", label="x"))
        (process,) = pool._held.processes
        namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", process.pid)}
        assert len(namespaces) == (2 if permitted == "True" else 1)
        assert b"HOME=" in Path(f"/proc/{process.pid}/environ").read_bytes(), "the guardian could not know it"

    with_pool(work, rm_type="exact_match")


SAYS = "(lambda o: o.system('touch {place}'))(__import__('os'))"
STEALS = "list(__import__('sys')._getframe(1).f_locals['entry']['answer'])"
OF_X = {"integrand": "2*x", "variable": "x"}
EVALUATED: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "string_insertion": ("ABC", {}, "['A', 'B', 'C']", 0.1),
    "spiral_matrix": ("1 2 3", {}, "[1, 2, 3]", 0.1),
    "countdown": ("1 + 2", {"numbers": [1, 2], "target": 3}, "2 + 1", 1.0),
    "polynomial_multiplication": ("x**2 - 1", {}, "-1 + x*x", 1.0),
    "simple_integration": ("x**2 + C", OF_X, "x*x + C", 1.0),
}
"""Task of reasoning-gym that evaluates answers as Python -> answer, metadata, another right answer, and its score."""


@pytest.mark.slow
def test_an_answer_is_run_as_no_program(tmp_path: Path) -> None:
    """Law: an answer that a library evaluates does nothing and finds no label; a formula is a formula still."""
    tmp_path.chmod(0o777)

    async def work(pool: GraderPool) -> None:
        for task, (answer, metadata, other, score) in EVALUATED.items():
            entry = {"question": "", "answer": answer, "metadata": metadata}

            async def graded(text: str, task: str = task, entry: dict[str, Any] = entry) -> Any:
                row = {"source_dataset": task, "entry": entry}
                got = await pool.score(Sample(response=f"<answer>{text}</answer>", label="", metadata=row))
                assert isinstance(got, Scored), got
                return got.value

            place = tmp_path / task
            for text in (SAYS.format(place=place), f"open('{place}', 'w')", f'exec(\'open("{place}", "w")\')', STEALS):
                assert await graded(text) <= 0.05, (task, text)
            assert (task, await graded(other)) == (task, score)
        (process,) = pool._held.processes
        if not missing_here():
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert process.missing == () and "Seccomp:\t2" in status
            assert os.getuid() != 0 or "\nUid:\t0" not in status, "it is root's"

    with_pool(work, rm_type="reasoning_gym", num_workers=1)
    assert list(tmp_path.iterdir()) == []


SCORES = """
import json
import reasoning_gym
from reasoning_gym.factory import DATASETS
from slime.rewards.graders.reasoning_gym_task import BOARDS, _with_boards
from slime.rewards.grader_confinement import Gate, shut_in
tasks = {name: reasoning_gym.create_dataset(name, seed=3, size=1) for name in sorted(DATASETS) if name != "composite"}
entries = {name: task[0] for name, task in tasks.items()}
entries |= {name: _with_boards(json.loads(json.dumps(entries[name]))) for name in BOARDS}
def one(name, text):
    try:
        return tasks[name].score_answer(text, entries[name])
    except Exception as error:
        return type(error).__name__
def score(name):
    right = str(entries[name]["answer"])
    return [one(name, text) for text in (right, str(list(right)), str(right.split()))]
open_scores = {name: score(name) for name in tasks}
gate, missing = Gate(), shut_in()
with gate.closed():
    assert {name: score(name) for name in tasks} == open_scores
assert sum(scores[0] == 1.0 for scores in open_scores.values()) > 90, open_scores
"""


@pytest.mark.slow
def test_right_answers_of_all_tasks_keep_their_scores() -> None:
    """Law: what holds a grader changes no score of an honest answer."""
    done = subprocess.run([sys.executable, "-c", SCORES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("text", ["Integer(2)*Symbol('x')**2", "['A', 1.5, (2, -3)]", "sqrt(2) + pi", "abs(-1)", "C"])
def test_the_gate_lets_formulas_through(text: str) -> None:
    assert is_formula(compile(text, "", "eval"), ["C"])


@pytest.mark.parametrize(
    "text",
    [
        *("x.y", "(lambda: 1)()", "[i for i in (1,)]", "open('x')", "oracle_answer", "__import__('os')", "eval('1')"),
        *("lambdify((), '1')", "S('1')", "parse_expr('1')", "f'{pi.args}'", "getattr(1, 'x')", "preview(pi)"),
    ],
)
def test_the_gate_refuses_programs(text: str) -> None:
    """Law: no attribute, definition, import, local variable, or function that is not named in a short list."""
    assert not is_formula(compile(text, "", "eval"))


def test_the_row_chooses_its_grader() -> None:
    async def work(pool: GraderPool) -> None:
        sample = Sample(response="yes", label="yes", metadata={"rm_type": "exact_match"})
        assert await pool.score(sample) == Scored(1.0)
        with pytest.raises(ConfigError, match="is not a grader"):
            await pool.score(Sample(metadata={"rm_type": "exact_mach"}))
        with pytest.raises(ConfigError, match="sample None has no reward and no grader is set for it"):
            await pool.score(Sample())

    with_pool(work)


def test_close_ends_a_start_and_who_waits_for_it() -> None:
    """A start that outlives the pool would wait for ever when the event loop ends and cancels all that is left."""

    async def work(pool: GraderPool) -> None:
        asked = asyncio.create_task(pool.score(Sample(response="x", label="x")))
        while not pool._held.starting:
            await asyncio.sleep(0)
        await pool.close()
        assert not pool._held.starting and not pool._held.processes
        with pytest.raises(SlimeError, match="closed"):
            await asked

    with_pool(work, rm_type="exact_match")


def test_close_leaves_no_process() -> None:
    pids: list[int] = []

    async def work(pool: GraderPool) -> None:
        await pool.score(Sample(response="x", label="x"))
        pids.extend(p.pid for p in pool._held.processes)

    with_pool(work, rm_type="exact_match")
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_workers_die_with_their_parent() -> None:
    code = (
        "import asyncio, time\nfrom slime.core.sample import Sample\nfrom slime.rewards.pool import GraderPool\n"
        "async def main():\n    pool = GraderPool(num_workers=1, timeout_s=600, custom_rm_path=PATH)\n"
        "    await pool.score(Sample(response='ok'))\n    print(pool._serial.processes[0].pid, flush=True)\n"
        "    await pool.score(Sample(response='hang'))\nasyncio.run(main())\n"
    ).replace("PATH", repr(f"{HOSTILE}:act"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


async def test_a_start_does_not_count_as_a_slow_request() -> None:
    """Law: only the grading can release a slot early. On a busy machine, starts would otherwise cause more starts."""
    lane = pool_module._Lane(1, 1, asyncio.Semaphore(1))
    async with lane.slot(limit_s=0.0) as begin:
        await asyncio.sleep(0.05)
        assert lane.num_slow == 0 and lane.slots.locked()
        begin()
        while lane.num_slow == 0:
            await asyncio.sleep(0.001)
        assert not lane.slots.locked()
    assert lane.num_slow == 0 and not lane.slots.locked()
