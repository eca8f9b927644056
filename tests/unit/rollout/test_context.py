"""Laws of what a hook can reach."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from pathlib import Path

import pytest

from slime.core.errors import HookError
from slime.core.sample import Sample
from slime.rewards.pool import GraderPool
from slime.rewards.scores import Score, Unscored
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import Models, current


def test_a_model_is_asked_by_its_name_and_another_name_says_what_is_served() -> None:
    judge = EngineClient("http://127.0.0.1:1", request_timeout_s=1.0)
    models = Models({"policy": EngineClient("http://127.0.0.1:2", request_timeout_s=1.0), "judge": judge})
    assert models["judge"] is judge and "jugde" not in models and len(models) == 2
    with pytest.raises(HookError, match=r"no engine serves the model 'jugde'; served models .*: policy, judge"):
        models["jugde"]
    with pytest.raises(HookError, match=r"served models .*: none"):
        Models()["judge"]


def _asked_in_a_thread() -> str:
    said: list[str] = []

    def ask() -> None:
        try:
            current()
        except HookError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask, name="judge-1")
    thread.start()
    thread.join()
    return said[0]


def test_outside_a_rollout_the_context_says_where_it_was_asked_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HookError, match=r"outside a rollout; call it in a generate function, a sample hook"):
        current()
    assert "in the thread judge-1, which has no rollout" in _asked_in_a_thread()
    (tmp_path / "asks_on_import.py").write_text(
        "from slime.rollout.context import current\nclient = current().client\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match=r"while a module is imported, before any rollout; call it inside"):
        importlib.import_module("asks_on_import")


def test_a_reward_function_that_asks_for_the_context_is_told_where_it_can_be_asked(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    file.write_text("def reward(args, sample):\n    from slime.rollout.context import current\n    return current()\n")

    async def grade() -> Score:
        pool = GraderPool(num_workers=1, timeout_s=600.0, custom_rm_path=f"{file}:reward")
        try:
            return await pool.score(Sample(response="a"))
        finally:
            await pool.close()

    score = asyncio.run(grade())
    assert isinstance(score, Unscored)
    assert "in a grader process, which has no rollout" in score.reason and "--rollout-sample-hook-path" in score.reason


def test_what_a_reward_function_prints_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Law: each line is logged once, and a function that prints without end stops neither itself nor the log."""
    file = tmp_path / "prints.py"
    file.write_text(
        "def reward(args, sample):\n    print('graded', sample.response)\n    print('x' * 2**21)\n    return 1\n"
    )

    async def grade() -> None:
        pool = GraderPool(num_workers=1, timeout_s=600.0, custom_rm_path=f"{file}:reward")
        try:
            assert isinstance(await pool.score(Sample(response="a")), Score)
            async with asyncio.timeout(60):
                while "the rest is not logged" not in caplog.text:
                    await asyncio.sleep(0.01)
        finally:
            await pool.close()

    caplog.set_level(logging.INFO)
    asyncio.run(grade())
    assert caplog.text.count("graded a\n") == 1 and len(caplog.text) < 3 * 2**20
