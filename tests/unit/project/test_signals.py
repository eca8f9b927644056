"""Law: SIGTERM and Ctrl-C end a command with all its processes, and leave no temporary file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.cli import upgrade_check
from slime.cli.main import main
from slime.cli.upgrade_check import Children
from slime.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
MARK = "SLIME_TEST_OF_SIGNALS"
LIMIT_S = 300.0
"""For a machine with far more processes than cores; it only bounds a test that fails."""


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)


def marked(value: str) -> list[int]:
    """The processes with this value of `MARK` in their environment; zombies have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={value}".encode() in environment:
            found.append(int(folder.name))
    return found


def start(tmp_path: Path, *command: str) -> subprocess.Popen[str]:
    """A command whose temporary files are in tmp_path/tmp; Ctrl-C acts on it, also if pytest runs in the background."""
    (tmp_path / "tmp").mkdir()
    more = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT), MARK: str(tmp_path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


SIGNALS = (
    (signal.SIGTERM, 143, "terminated by SIGTERM"),
    pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_upgrade_check_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    command = start(tmp_path, sys.executable, "-m", "slime", "upgrade-check", "--names-only")
    until(lambda: [*(tmp_path / "tmp").glob("slime-upgrade-*/venv")] and len(marked(str(tmp_path))) > 1, "its child")
    command.send_signal(number)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == code and f"python -m slime upgrade-check: {said}" in output, output
    assert "Traceback" not in output
    assert not [*(tmp_path / "tmp").iterdir()]
    until(lambda: not marked(str(tmp_path)), "the end of its children")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_a_conversion_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    """The write takes forever, so that the signal comes in the middle of it."""
    code_of_command = (
        "import sys, time, slime.cli.checkpoint_conversion as c\n"
        "def wait(partial, *_, **__):\n"
        "    (partial / 'half.safetensors').write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(10_000)\n"
        "c.write_hf = wait\n"
        "from slime.cli.main import main\n"
        "sys.exit(main(['convert', 'source', 'target', '--to', 'bf16']))\n"
    )
    tiny_llama(tmp_path / "source")
    command = start(tmp_path, sys.executable, "-c", code_of_command)
    assert command.stdout is not None
    lines = [command.stdout.readline()]
    while "writing" not in lines[-1]:
        assert lines[-1], "".join(lines)
        lines.append(command.stdout.readline())
    assert (tmp_path / "target.writing").is_dir()
    command.send_signal(number)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == code and said in output, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "tmp"]


def tiny_llama(folder: Path) -> None:
    size, width, words = 8, 16, 32
    shapes = {
        "model.embed_tokens": (words, size),
        "lm_head": (words, size),
        "model.norm": (size,),
        "model.layers.0.input_layernorm": (size,),
        "model.layers.0.post_attention_layernorm": (size,),
        **{f"model.layers.0.self_attn.{name}_proj": (size, size) for name in "qkvo"},
        "model.layers.0.mlp.gate_proj": (width, size),
        "model.layers.0.mlp.up_proj": (width, size),
        "model.layers.0.mlp.down_proj": (size, width),
    }
    config = {
        **{"model_type": "llama", "hidden_size": size, "intermediate_size": width, "vocab_size": words},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 64},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_recipe_ends_with_its_training(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """bash runs the training; a signal to bash alone reaches it, and the code is that of the training."""
    training = (
        "import signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    assert signal.getsignal(number) is not signal.SIG_IGN\n"
        "    signal.signal(number, lambda number, _: sys.exit(128 + number))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(10_000)\n"
    )
    (tmp_path / "training.py").write_text(training)
    host = ROOT / "slime" / "cli" / "recipes" / "host.sh"
    script = f'set -euo pipefail\n. {host}\ncd {tmp_path}\nrun "$PY" training.py\necho not reached\n'
    (tmp_path / "run.sh").write_text(script)
    command = start(tmp_path, "env", f"PY={sys.executable}", "bash", str(tmp_path / "run.sh"))
    until((tmp_path / "ready").is_file, "the training")
    command.send_signal(number)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == code and "not reached" not in output, (command.returncode, output)
    until(lambda: not marked(str(tmp_path)), "the end of the training")


def test_the_code_of_a_recipes_training_is_that_of_the_recipe(tmp_path: Path) -> None:
    host = ROOT / "slime" / "cli" / "recipes" / "host.sh"
    for code in (0, 3):
        script = f'set -euo pipefail\n. {host}\nrun "$PY" -c "import sys; sys.exit({code})"\necho reached\n'
        done = subprocess.run(
            ["bash", "-c", script, str(host.parent / "demo" / "run.sh")],
            env={**os.environ, "PY": sys.executable, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and ("reached" in done.stdout) == (code == 0), done.stderr


def test_a_child_that_ignores_ctrl_c_is_killed_with_its_own_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade_check, "GRACE_S", 0.2)
    monkeypatch.setenv(MARK, str(tmp_path))
    with Children() as children:
        with pytest.raises(subprocess.TimeoutExpired):
            children.run(["bash", "-c", "trap '' INT; sleep 10000 & wait"], limit_s=0.2)
        mine = {os.getpid()}
        until(lambda: not {*marked(str(tmp_path))} - mine, "the end of the child and of its child")
    with pytest.raises(ConfigError, match="because the check is stopping"):
        children.run(["true"])


def test_a_command_gives_back_the_handler_of_sigterm(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["report", "/nowhere"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
