"""The driver names methods of actors by strings and handles that no type checker sees: each of them exists."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from slime.cluster.engine_actors import EngineActor
from slime.cluster.rollout_actor import RolloutActor
from slime.cluster.train_actor import TrainActor

CLUSTER = Path(__file__).parents[3] / "slime" / "cluster"
BY_CALL = {"on_trainers": TrainActor, "on_lenders": EngineActor, "on_rollout": RolloutActor}
BY_HANDLE = {"trainer": TrainActor, "engine": EngineActor, "rollout": RolloutActor}


def methods(actor: Any) -> set[str]:
    """Names of the methods of the class that Ray wraps."""
    return set(dir(actor.__ray_metadata__.modified_class))


def called() -> list[tuple[str, Any, str]]:
    """(file, actor, method) of every call: `on_trainers("method")` and `trainer.method.remote()`."""
    found = []
    for path in sorted(CLUSTER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            first = node.args[0] if node.args else None
            if node.func.attr in BY_CALL and isinstance(first, ast.Constant):
                found.append((path.name, BY_CALL[node.func.attr], str(first.value)))
            target = node.func.value
            if node.func.attr in ("remote", "options") and isinstance(target, ast.Attribute):
                handle = ast.unparse(target.value).rpartition(".")[2]
                if handle in BY_HANDLE:
                    found.append((path.name, BY_HANDLE[handle], target.attr))
    return found


def test_every_method_that_the_driver_calls_exists() -> None:
    calls = called()
    assert len(calls) > 20, f"found {len(calls)} calls; the driver has more"
    missing = [f"{file}: {method}" for file, actor, method in calls if method not in methods(actor)]
    assert not missing, f"no such method of an actor: {missing}"
