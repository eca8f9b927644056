"""Laws of a broadcast update of an engine with a draft: both models get every tensor, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.compat.sglang_0_5_16 import models, reach_the_draft


class Model:
    """The part of a model that an update sees."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []

    def load_weights(self, weights: Iterable[tuple[str, int]]) -> None:
        self.loaded += list(weights)


def manager_of(model: Model, draft: Model | None) -> Any:
    inner = None if draft is None else SimpleNamespace(draft_runner=SimpleNamespace(model=draft))
    worker = None if draft is None else SimpleNamespace(draft_worker=inner)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)), draft_worker=worker)


def test_both_models_load_what_is_broadcast() -> None:
    model, draft = Model(), Model()
    manager = manager_of(model, draft)
    assert models(manager) == [model, draft] and models(manager_of(model, None)) == [model]

    def update(manager: Any, tensors: dict[str, int]) -> str:
        manager.tp_worker.model_runner.model.load_weights(iter(tensors.items()))
        return "done"

    assert reach_the_draft(update, manager, {"a": 1, "b": 2}) == "done"
    assert model.loaded == draft.loaded == [("a", 1), ("b", 2)]
    model.load_weights([("c", 3)])
    assert draft.loaded == [("a", 1), ("b", 2)], "outside of an update the model loads for itself"


def test_a_failed_update_leaves_the_loader_as_it_was() -> None:
    model = Model()

    def update(_manager: Any, _request: Any) -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        reach_the_draft(update, manager_of(model, Model()), None)
    assert "load_weights" not in vars(model)
