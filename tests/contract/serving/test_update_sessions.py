"""A session of weight updates has one owner, and an engine does not serve while one is open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime.core.engine_interface import BEFORE_SESSIONS, is_installed
from slime.core.errors import EngineError
from slime.serving.control import HttpEngineControl
from slime.serving.server import SGLangServer

pytestmark = pytest.mark.skipif(is_installed("sglang", BEFORE_SESSIONS), reason="this SGLang has no sessions")
DISK = {"flush_cache": False, "weight_version": 7}


@pytest.fixture
def controls(engine_server: SGLangServer) -> Iterator[list[HttpEngineControl]]:
    spec = engine_server.spec
    made = [
        HttpEngineControl(engine_server.url, spec.layout, 60, api_key=spec.keys.control, sender=sender)
        for sender in ("run one", "run two")
    ]
    yield made
    made[1].begin_update()  # whatever a failed test has left open
    made[1].end_update()
    made[1].resume()
    for control in made:
        control.close()


def test_the_newest_sender_owns_the_session(controls: list[HttpEngineControl], engine_server: SGLangServer) -> None:
    """Law: of two runs that update an engine, the earlier one can neither load, nor end, nor resume."""
    first, second = controls
    first.pause()
    first.begin_update()
    with pytest.raises(EngineError, match=r"409.*cannot resume during a weight update"):
        first.resume()
    second.pause()
    second.begin_update()
    model = engine_server.spec.model_path
    for refused in (
        lambda: first.update_weights_from_disk(model_path=model, **DISK),  # type: ignore[arg-type]
        lambda: first.update_weights_from_tensor(["cA=="], load_format=None, **DISK),  # type: ignore[arg-type]
        first.end_update,
    ):
        with pytest.raises(EngineError, match=r"409.*another run has started"):
            refused()
    with pytest.raises(EngineError, match="409"):
        first.resume()
    second.update_weights_from_disk(model_path=model, **DISK)  # type: ignore[arg-type]
    second.end_update()
    second.resume()


def test_a_sender_that_died_does_not_stop_the_next_one(controls: list[HttpEngineControl]) -> None:
    """Law: a session that is left open is ended by the next one, of the same run or of another."""
    first, second = controls
    first.pause()
    first.begin_update()
    first.begin_update()
    second.begin_update()
    second.end_update()
    with pytest.raises(EngineError, match="no weight-update session is open"):
        second.end_update()
    second.resume()
