"""Laws of what a hook can reach."""

from __future__ import annotations

import pytest

from slime.core.errors import HookError
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import Models


def test_a_model_is_asked_by_its_name_and_another_name_says_what_is_served() -> None:
    judge = EngineClient("http://127.0.0.1:1", request_timeout_s=1.0)
    models = Models({"policy": EngineClient("http://127.0.0.1:2", request_timeout_s=1.0), "judge": judge})
    assert models["judge"] is judge and "jugde" not in models and len(models) == 2
    with pytest.raises(HookError, match=r"no engine serves the model 'jugde'; served models .*: policy, judge"):
        models["jugde"]
    with pytest.raises(HookError, match=r"served models .*: none"):
        Models()["judge"]
