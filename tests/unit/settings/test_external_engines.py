"""Laws: engines that run already are named by addresses, alone or in a file, and parsing asks none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.core.processes import server_url
from slime.settings import parse_args
from slime.settings.flag_parser import OVERRIDE
from slime.settings.topology_yaml import read_addresses, topology_of

TWO = ["--rollout-external-engine-addrs", "127.0.0.1:31001", "http://other:31002"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.7:30000", "http://10.0.0.7:30000"),
        (" http://Host:1/ ", "http://host:1"),
        ("[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_an_address_has_one_spelling(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "https://host:1", "host:1/path", "u@host:1", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use HOST:PORT"):
        server_url(text)


def test_a_file_has_an_address_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("# ours\na:1  # the first\n\n  b:2\n")
    assert read_addresses([f"@{file}"]) == ("http://a:1", "http://b:2")
    file.write_text("a:1\nb\n")
    with pytest.raises(ConfigError, match=r"engines:2: 'b' is not"):
        read_addresses([f"@{file}"])
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="has no address"):
        read_addresses([f"@{file}"])
    with pytest.raises(ConfigError, match="names both a file and addresses"):
        read_addresses([f"@{file}", "c:3"])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_addresses([f"@{tmp_path}/nothing"])


def test_the_run_starts_no_engines_and_asks_none(base: list[str]) -> None:
    args = parse_args([*base, *TWO])
    assert read_addresses(args.rollout_external_engine_addrs) == ("http://127.0.0.1:31001", "http://other:31002")
    assert (args.rollout_num_gpus, args.update_weight_transport) == (0, "distributed")
    (model,) = topology_of(args).models
    assert model.trained and model.path == args.hf_checkpoint and not list(topology_of(args).wanted())
    args = parse_args([*base, *TWO, "--rollout-num-gpus", "3"])
    assert args.rollout_num_gpus == 0 and "report their own size" in args.idle["rollout_num_gpus"]


def test_their_key_may_come_from_the_environment(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ENGINE_API_KEY", "sesame")
    assert parse_args([*base, *TWO]).sglang["api_key"] == "sesame"
    assert "sesame" not in str(parse_args([*base, *TWO]).to_json_dict())
    assert parse_args([*base, *TWO, "--sglang-api-key", "own"]).sglang["api_key"] == "own"
    assert parse_args(base).sglang.get("api_key") is None, "engines of a run have a key of the run"
    monkeypatch.setenv("SLIME_ENGINE_ADMIN_API_KEY", "open")
    assert parse_args([*base, *TWO]).sglang["admin_api_key"] == "open"
    assert parse_args(base).sglang.get("admin_api_key") is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--colocate"], "do not release memory"),
        (["--update-weight-transport", "tensor"], "use distributed, or disk"),
        (["--rollout-external-engine-addrs", "a:1", "http://a:1"], "twice"),
        (["--rollout-external-engine-addrs", "a"], "use HOST:PORT"),
    ],
)
def test_what_cannot_work_with_them_is_refused(base: list[str], more: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args([*base, *TWO, OVERRIDE, *more])


def test_a_file_of_topologies_starts_engines(base: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("sglang: [{name: a, server_groups: [{num_gpus: 1}]}]")
    with pytest.raises(ConfigError, match="the run starts none"):
        parse_args([*base, *TWO, "--sglang-config", str(file)])


def test_a_router_that_runs_already_is_named_whole(base: list[str]) -> None:
    where = ["--sglang-router-ip", "10.0.0.1", "--sglang-router-port", "30000"]
    args = parse_args([*base, *where, "--router-api-key", "k"])
    assert (args.sglang_router_ip, args.sglang_router_port) == ("10.0.0.1", 30000)
    for given, said in ((where[:2], "needs --sglang-router-port"), (where[2:], "needs --sglang-router-ip")):
        with pytest.raises(ConfigError, match=said):
            parse_args([*base, *given])
    with pytest.raises(ConfigError, match="lets anyone add servers"):
        parse_args([*base, *where])
    assert "router_port" in parse_args([*base, *where, "--router-api-key", "k", "--router-port", "1"]).idle
