"""Law: what this machine, the run folder or the data cannot give is refused together; what may work passes."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cli.doctor import FAIL, OK, check_temporary_folder
from slime.cluster import preflight as module
from slime.cluster.preflight import preflight
from slime.core.errors import ConfigError
from slime.core.processes import SHORT_ROOM
from slime.settings import parse_args
from slime.settings.flag_parser import OVERRIDE
from slime.settings.groups import cluster
from tests.support.fake_mooncake import write_mooncake

Words = Callable[..., list[str]]


@pytest.fixture
def words(tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Words:
    """A command line that is right, with more flags."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1})
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1+1", "label": "2"}\n' * 4)
    return lambda *more: [
        *("--hf-checkpoint", str(tiny_qwen3), "--prompt-data", str(data), "--run-dir", str(tmp_path / "run")),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "3", "--rm-type", "math"),
        *("--label-key", "label", "--rollout-max-response-len", "8", "--device", "cpu", OVERRIDE, *more),
    ]


def told(words: list[str]) -> str:
    """What is refused; empty if nothing is."""
    try:
        preflight(parse_args(words))
    except ConfigError as error:
        return str(error)
    return ""


GREETING = b"\0\0\0\4\0\0\0\0\0"
"""What a gRPC server says first."""


class OtherServer:
    """Listens, and says `answer` to whoever greets it."""

    def __init__(self, answer: bytes, port: int = 0) -> None:
        self._socket, self._answer = socket.create_server(("127.0.0.1", port)), answer
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with self._socket, connection:
            connection.recv(100)
            connection.sendall(self._answer)
            with contextlib.suppress(ConnectionResetError):
                connection.recv(100)


def test_a_server_that_is_not_the_head_of_a_cluster_is_told_in_a_sentence(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would try for minutes, and print lines of C++. Its real head is in tests/contract/cluster."""
    monkeypatch.setattr(module, "CONNECT_LIMIT_S", 0.2)
    other = "another kind of server is listening there"
    for answer, reason in ((b"HTTP/1.1 400 Bad Request\r\n\r\n", other), (b"", "no answer")):
        address = OtherServer(answer).address
        said = told(words("--ray-address", address))
        assert f"no Ray cluster can be reached at ray_address {address} ({reason})" in said
    assert told(words("--ray-address", OtherServer(b"\0\0\0\4\0\0\0\0\0").address)) == ""


def test_a_head_that_comes_late_is_waited_for(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with --cluster-wait-s, an address may answer later; the limit is in the error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    late: list[OtherServer] = []
    monkeypatch.setattr(module.time, "sleep", lambda pause_s: late.append(OtherServer(GREETING, port)))
    at = ["--ray-address", f"127.0.0.1:{port}"]
    assert told(words(*at, "--cluster-wait-s", "60")) == "" and len(late) == 1
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "within 0.01 s (Connection refused)" in told(
        words("--ray-address", f"127.0.0.1:{port}", "--cluster-wait-s", "0.01")
    )


def test_what_may_work_passes(words: Words) -> None:
    assert told(words()) == ""
    assert told(words("--actor-num-gpus-per-node", "2")) == ""


def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("t" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert f"TMPDIR {folder} of {len(str(folder))} characters" in told(words())
    assert check_temporary_folder().state == FAIL
    monkeypatch.setattr(tempfile, "tempdir", SHORT_ROOM)  # pytest's own folder may be too long as well
    assert told(words()) == "" and check_temporary_folder().state == OK
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    assert f"RAY_TMPDIR {folder} of" in told(words()) and check_temporary_folder().state == FAIL
    monkeypatch.setenv("RAY_TMPDIR", "/proc/ray")
    assert "/proc/ray/slime-ray-" in told(words()) and "/proc is not writable" in told(words())


def test_what_engines_in_pairs_lack_is_found_before_they_start(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "libnuma.so.1: cannot open shared object file"
    write_mooncake(tmp_path, f"raise ImportError({said!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert told(words()) == ""
    pairs = ["--rollout-num-gpus", "2", "--prefill-num-servers", "1"]
    assert said in told(words(*pairs)) and "apt-get install" in told(words(*pairs))
    write_mooncake(tmp_path, "")
    assert told(words(*pairs)) == ""


def test_all_is_told_at_once(words: Words, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    said = told(words("--actor-num-gpus-per-node", "4", "--global-batch-size", "4", "--input-key", "prompt"))
    assert said.startswith("3 problems:")
    assert "2 cores" in said and "choose a new --run-dir" in said and "--input-key" in said


def test_a_run_folder_is_used_once_metrics_are_in_it(words: Words, tmp_path: Path) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    run.mkdir()
    (run / "run.json").write_text('{"starts": [{}]}')
    assert told(words()) == "", "a start that failed before its first step"
    (run / "metrics.jsonl").write_text("")
    assert told(words()) == ""
    (run / "metrics.jsonl").write_text('{"rollout/step": 0}\n')
    assert "--load" in told(words())
    assert f"--save {save} contains no checkpoint from which to continue" in told(words("--save", str(save)))
    assert told(words("--save", str(save), "--load", str(save))) == "", "killed before its first checkpoint"


def test_a_save_folder_with_steps_of_another_run_is_refused(words: Words, tmp_path: Path) -> None:
    """Retention would remove them, and a step of the same number replaces the other."""
    save, other = tmp_path / "save", tmp_path / "other"
    for step in (save / "step_000079", other / "step_000007"):
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
    refused = f"--save {save} contains checkpoints of another run; choose a new folder, or continue that run"
    assert refused in told(words("--save", str(save)))
    assert refused in told(words("--save", str(save), "--load", str(other))), "steps of `save` are none of `other`"
    for load in (save, save / "step_000079"):
        assert told(words("--save", str(save), "--load", str(load))) == ""
    assert told(words("--save", str(tmp_path / "new"), "--load", str(other))) == ""


def test_folders_that_cannot_be_written_are_all_told_and_nothing_is_left(words: Words, tmp_path: Path) -> None:
    flags = ["--save", "/proc/nope", "--save-debug-rollout-data", "/dev/null/{rollout_id}.jsonl.zst"]
    said = told(words(*flags, "--save-hf", str(tmp_path / "new" / "hf_{rollout_id}")))
    assert "--save /proc/nope cannot be created: /proc is not writable; choose a different folder" in said
    path = "--save-debug-rollout-data /dev/null/{rollout_id}.jsonl.zst"
    assert f"{path} cannot be created: /dev/null is a file" in said
    assert "--save-hf" not in said and sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]


@pytest.mark.parametrize(
    ("gpus", "flags", "said"),
    [
        (0, (), "use --device cpu"),
        (1, (), "needs 2 GPUs, but this machine has 1"),
        (1, ("--colocate",), ""),
        (2, (), ""),
        (1, ("--colocate", "--actor-num-gpus-per-node", "2"), "needs 2 GPUs"),
        (None, (), ""),
    ],
)
def test_gpus_are_counted(
    words: Words, gpus: int | None, flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gpus_here", lambda: gpus)
    found = told(words(*flags, "--device", "cuda"))
    assert said in found and bool(said) == bool(found)
    monkeypatch.setenv("RAY_ADDRESS", OtherServer(b"\0\0\0\4\0\0\0\0\0").address)
    assert told(words(*flags, "--device", "cuda")) == "", "the processes run on other machines"


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cluster.gpus_here() == 2
    for visible, number in (("", 0), ("1", 1), ("0,1", 2), ("GPU-a", 1), ("MIG-1,MIG-2,MIG-3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cluster.gpus_here() == number


def test_explain_asks_no_machine(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(words("--device", "cuda", "--actor-num-gpus-per-node", "2", "--input-key", "prompt", "--explain"))
    assert end.value.code == 0 and "device = cuda" in capsys.readouterr().out


@pytest.mark.parametrize(
    "own",
    [
        ("--data-source-path", "pkg.Source"),
        ("--custom-rm-path", "pkg.reward", "--input-key", "input"),
        ("--custom-generate-function-path", "pkg.generate", "--input-key", "input"),
    ],
)
def test_what_a_user_replaces_is_not_looked_at(words: Words, own: tuple[str, ...]) -> None:
    """The source of the rows; who makes labels, and who renders messages."""
    keys = () if "--input-key" in own else ("--input-key", "nothing")
    assert told([*words(), "--label-key", "none", *keys, *own]) == ""
