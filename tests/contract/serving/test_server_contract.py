"""A real SGLang server on the CPU behind a real router."""

from __future__ import annotations

import json
from pathlib import Path

from slime.serving.leased_ports import lease_ports, request
from slime.serving.router import Router
from slime.serving.server import SGLangServer
from tests.support.engines import fronting, send_nothing, send_to

PROMPT = [2, 40, 41, 42]


def test_the_router_forwards_token_ids_and_returns_ids_with_log_probs(router: Router) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
    }
    status, text = request("POST", f"{router.url}/generate", body, timeout_s=60, api_key=router.api_key)
    assert status == 200, text
    answer = json.loads(text)
    assert len(answer["output_ids"]) == 8
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


def test_the_checksum_of_every_resident_tensor_works_on_a_cpu(engine_server: SGLangServer) -> None:
    status, text = request("POST", f"{engine_server.url}/weights_checker", {"action": "checksum"}, timeout_s=60)
    assert status == 200, text
    assert "model.layers.0.self_attn.qkv_proj.weight" in text


def test_a_worker_can_leave_and_come_back(router: Router, engine_server: SGLangServer) -> None:
    send_nothing(router)
    send_to(router, engine_server.url)
    assert [w.url for w in router.workers()] == [engine_server.url]


def test_a_router_on_a_fixed_port_with_a_key_answers_nobody_else(engine_server: SGLangServer, tmp_path: Path) -> None:
    with lease_ports() as free:
        port = free.port
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    settings = {"host": "0.0.0.0", "port": port, "extra_args": {"api_key": "secret", "oracle_password": "of-a-base"}}
    with fronting(engine_server.url, tmp_path, **settings) as router:
        assert router.url == f"http://127.0.0.1:{port}"
        for path, sent in (("generate", body), ("workers", {"url": "http://127.0.0.1:9"})):
            status, text = request("POST", f"{router.url}/{path}", sent, timeout_s=60)
            assert status == 401, f"/{path} without the key: {status} {text}"
        status, text = request("POST", f"{router.url}/generate", body, timeout_s=60, api_key="secret")
        assert status == 200, text
        command_line = Path(f"/proc/{router.pid}/cmdline").read_bytes()
        assert command_line and b"secret" not in command_line and b"of-a-base" not in command_line


def test_the_processes_of_a_server_share_one_import(engine_server: SGLangServer) -> None:
    assert "cannot fork the server's children" not in engine_server.log_path.read_text(errors="replace")
