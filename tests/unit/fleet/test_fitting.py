"""Law: an engine that somebody else started is used only if it fits, and everything that does not is said at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.fleet.fitting import Wanted, misfits, refuse
from slime.models import table_for
from slime.serving.watch import Probe, ServerFacts

PLAIN = Probe(repeats=False, labels=False, experts=False)


@pytest.fixture(scope="module")
def wanted(tiny_qwen3: Path) -> Wanted:
    config = read_hf_config(str(tiny_qwen3))
    settings = {"dtype": "float32", "disable_radix_cache": True}
    return Wanted(config, table_for(config), settings, labels=False, experts=False, trains=True)


@pytest.fixture(scope="module")
def facts(tiny_qwen3: Path, wanted: Wanted) -> ServerFacts:
    info = {"version": "0.5.16", "dtype": "float32", "disable_radix_cache": True, "tp_size": 1, "pp_size": 1}
    model = {"model_path": str(tiny_qwen3), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model |= {"weight_version": "default", "is_generation": True}  # type: ignore[dict-item]
    info["custom_weight_loader"] = []  # type: ignore[assignment]
    return ServerFacts("http://a:1", info, model, frozenset(wanted.table.resident), PLAIN)


def changed(facts: ServerFacts, **changes: Any) -> ServerFacts:
    """A server that differs in some settings, or in what it says of its model."""
    model = {name: changes.pop(name) for name in list(changes) if name in facts.model}
    own = {name: changes.pop(name) for name in ("resident", "probe", "problem", "is_open") if name in changes}
    return dataclasses.replace(facts, info={**facts.info, **changes}, model={**facts.model, **model}, **own)


def test_the_same_model_and_settings_fit(facts: ServerFacts, wanted: Wanted) -> None:
    assert misfits(facts, wanted) == []
    assert misfits(changed(facts, tp_size=2, model_path="/not/here"), wanted) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.5.15"}, "SGLang 0.5.15"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"is_generation": False}, "embedding server"),
        ({"dtype": "auto"}, "--dtype auto, but the run requires float32"),
        ({"disable_radix_cache": False}, "--disable-radix-cache off, but the run requires on"),
        ({"pp_size": 2, "custom_weight_loader": []}, "reports only its first stage"),
        ({"dp_size": 2}, "each replica of a model is a separate engine"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"tp_size": 3}, "cannot be split over"),
        ({"disaggregation_mode": "prefill"}, "prefill worker"),
        ({"enable_lora": True}, "adapters"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "--hicache-storage-backend file"),
        (
            {"enable_lmcache": True},
            "--enable-lmcache would serve prefixes of old weights under new ones: the LMCache store",
        ),
        ({"probe": dataclasses.replace(PLAIN, repeats=True)}, "--incremental-streaming-output"),
        ({"probe": None, "problem": "it answered /generate with 500"}, "with 500"),
    ],
)
def test_what_does_not_fit_is_said(facts: ServerFacts, wanted: Wanted, changes: dict[str, Any], said: str) -> None:
    (problem,) = misfits(changed(facts, **changes), wanted)
    assert said in problem


def test_an_interrupted_update_is_left_to_the_next_weight_sync(facts: ServerFacts, wanted: Wanted) -> None:
    """Law: such a server samples nothing for a probe, because its weights may be half new."""
    found = changed(facts, probe=None, is_open=True)
    assert misfits(found, wanted) == []
    (problem,) = misfits(found, dataclasses.replace(wanted, trains=False))
    assert "interrupted" in problem


def test_tensors_of_another_model_are_named(facts: ServerFacts, wanted: Wanted) -> None:
    names = facts.resident
    fewer = frozenset(name for name in names if ".layers.1." not in name)
    (problem,) = misfits(changed(facts, resident=fewer), wanted)
    assert "has no model.layers.1." in problem
    (problem,) = misfits(changed(facts, resident=names | {"model.layers.9.x"}), wanted)
    assert "has model.layers.9.x" in problem


def test_sizes_are_compared_where_its_folder_is_seen(facts: ServerFacts, wanted: Wanted, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**wanted.config, "hidden_size": 48, "rms_norm_eps": 0.5}))
    (problem,) = misfits(changed(facts, model_path=str(tmp_path)), wanted)
    assert "hidden_size 48 instead of" in problem and "rms_norm_eps 0.5 instead of" in problem


def test_what_pauses_and_routed_experts_ask_for(facts: ServerFacts, wanted: Wanted) -> None:
    asking = dataclasses.replace(wanted, labels=True, experts=True, trains=False)
    said = " ".join(misfits(facts, asking))
    assert "--token-versions" in said and "--enable-return-routed-experts" in said and "--weight-version 0" in said
    told = changed(facts, probe=Probe(repeats=False, labels=True, experts=True), weight_version="0")
    assert misfits(told, asking) == []


def test_caches_that_are_not_divided_fit_where_each_weight_sync_flushes(facts: ServerFacts, wanted: Wanted) -> None:
    cached = changed(facts, enable_hierarchical_cache=True, probe=Probe(repeats=False, labels=True, experts=False))
    assert misfits(cached, wanted) == []
    (problem,) = misfits(cached, dataclasses.replace(wanted, labels=True))
    assert "--enable-hierarchical-cache would serve" in problem and "not keyed by weights" in problem
    stored = changed(cached, enable_flexkv=True, weight_version="0")
    assert misfits(stored, dataclasses.replace(wanted, trains=False)) == [], "weights that stay are the same for all"


def test_one_report_has_all_engines_with_all_that_is_wrong(facts: ServerFacts, wanted: Wanted) -> None:
    wrong = changed(facts, version="0.5.15", dtype="auto")
    with pytest.raises(ConfigError) as found:
        refuse({"http://a:1": misfits(wrong, wanted), "http://b:2": ["it does not answer"], "http://c:3": []})
    text = str(found.value)
    assert text.startswith("this run cannot use 2 external engines") and "http://c:3" not in text
    assert all(part in text for part in ("0.5.15", "--dtype auto", "it does not answer", "Engines that run already"))
    refuse({"http://c:3": []})
