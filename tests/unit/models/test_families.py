"""A family is one folder or one file: what is registered keeps the contract, and a new one needs no other edit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.models import FAMILIES, Family, architecture, family_of, load_family, table_for
from tests.support.command_line import QWEN3, complete

ROOT = Path(__file__).parents[3]
TOY = '''
from dataclasses import dataclass

from slime.models import FAMILIES, Family
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm


@FAMILIES.register("toy_of_the_tests")
@dataclass(frozen=True, kw_only=True)
class Toy(Family):
    """Norms of q and k, and a setting."""

    toy_strength: float = 1.0
    """What it is."""

    def check(self, args):
        return "got a toy that is too weak" if self.toy_strength < 0 else None

    def departures(self, hf_config):
        return {"qk_layernorm": True}

    def weight_map(self, hf_config):
        return decoder_table(
            hf_config,
            lambda s, _: pre_norm(s.hidden_size, attention(s, qk_norm=True), mlp(s.hidden_size, s.intermediate_size)),
        )
'''


def test_every_family_is_documented_and_named() -> None:
    families = dict(FAMILIES)
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "qwen3_next"} <= families.keys()
    assert all(issubclass(f, Family) and f.__doc__ and f.name in families for f in families.values())


def test_an_unknown_model_type_is_refused_by_every_question() -> None:
    for question in (architecture, table_for, family_of):
        with pytest.raises(ConfigError, match=r"gpt_unheard_of.*qwen3.*--model-family"):
            question({"model_type": "gpt_unheard_of"})
        with pytest.raises(ConfigError, match=r"os\.system"):
            question({"model_type": "os.system"})


@pytest.mark.slow
def test_questions_about_a_model_import_neither_torch_nor_megatron() -> None:
    """The command line asks them."""
    code = (
        "import sys\n"
        "from slime.models import FAMILIES, family_of\n"
        "from tests.support.published import SYNCED\n"
        "from slime.core.hf_config import text_config\n"
        "for config, _ in SYNCED.values():\n"
        "    config = text_config(config)\n"
        "    family = family_of(config)\n"
        "    family.architecture(config), family.weight_map(config), family.flops(config)\n"
        "assert FAMILIES.names()\n"
        "bad = {'torch', 'transformers', 'megatron', 'sglang', 'ray'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
def test_a_family_is_one_file_of_the_users_own(tmp_path: Path) -> None:
    """With a setting, whose flag is known as soon as the file is named, and a check of its own."""
    file = tmp_path / "toy_family.py"
    file.write_text(TOY)
    words = [*complete(tmp_path), "--model-family", str(file), "--toy-strength"]
    config = Path(words[words.index("--hf-checkpoint") + 1]) / "config.json"
    config.write_text(json.dumps({**QWEN3, "model_type": "toy_of_the_tests"}))
    code = (
        "import sys\n"
        "from slime.core.hf_config import read_hf_config\n"
        "from slime.models import family_of, table_for\n"
        "from slime.settings import parse_args\n"
        "args = parse_args(sys.argv[1:])\n"
        "config = read_hf_config(args.hf_checkpoint)\n"
        "assert args.megatron['qk_layernorm'] and args.megatron['num_layers'] == len(table_for(config).layers)\n"
        "assert args.toy_strength == family_of(config, args).toy_strength == 2.5\n"
        "assert family_of(config).flops(config).forward(8) > 0\n"
        "assert 'torch' not in sys.modules\n"
    )

    def run(strength: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words, strength]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    good, bad = run("2.5"), run("-1")
    assert good.returncode == 0, good.stderr
    assert "too weak" in bad.stderr and "ConfigError" in bad.stderr, bad.stderr


def test_a_family_that_is_registered_for_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "unregistered.py"
    file.write_text(TOY.replace('@FAMILIES.register("toy_of_the_tests")\n', ""))
    with pytest.raises(ConfigError, match="not registered for a model_type"):
        load_family(f"{file}:Toy")
    with pytest.raises(ConfigError, match="registers no entry; add the decorator"):
        load_family(str(file))
