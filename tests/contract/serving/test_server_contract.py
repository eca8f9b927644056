"""A real SGLang server on the CPU behind a real router."""

from __future__ import annotations

import json

from slime.serving.plain_http import request
from slime.serving.router import Router
from slime.serving.server import SGLangServer

PROMPT = [2, 40, 41, 42]


def test_the_router_forwards_token_ids_and_returns_ids_with_log_probs(router: Router) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
    }
    status, text = request("POST", f"{router.url}/generate", body, timeout_s=60)
    assert status == 200, text
    answer = json.loads(text)
    assert len(answer["output_ids"]) == 8
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


def test_the_checksum_of_every_resident_tensor_works_on_a_cpu(engine_server: SGLangServer) -> None:
    status, text = request("POST", f"{engine_server.url}/weights_checker", {"action": "checksum"}, timeout_s=60)
    assert status == 200, text
    assert "model.layers.0.self_attn.qkv_proj.weight" in text


def test_a_worker_can_leave_and_come_back(router: Router, engine_server: SGLangServer) -> None:
    router.remove_worker(engine_server.url)
    assert router.workers() == []
    router.add_worker(engine_server.url)
    assert [w.url for w in router.workers()] == [engine_server.url]
