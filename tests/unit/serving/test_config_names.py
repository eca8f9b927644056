"""A config whose `model_type` transformers does not know is read by the class that has its keys, and no code of the
folder is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.compat.sglang_config_names import READ_AS, unnamed_type

REMOTE = {"AutoConfig": "configuration_mimo.MiMoConfig"}
CODE = (
    "import sys\n"
    "from slime.compat.sglang_config_names import register\n"
    "from transformers import AutoConfig\n"
    "register('mimo'), register('mimo')\n"
    "config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)\n"
    "assert config.model_type == 'mimo' and config.num_nextn_predict_layers == 1, config\n"
    "assert config.rope_parameters['rope_theta'] == 640000, config\n"
    "import pickle\n"
    "open(sys.argv[2], 'wb').write(pickle.dumps(config))\n"
)
SPAWNED = "import pickle, sys; assert pickle.load(open(sys.argv[1], 'rb')).rope_parameters['rope_theta'] == 640000"


@pytest.mark.slow
def test_a_published_folder_is_read_without_its_code(tmp_path: Path) -> None:
    (tmp_path / "configuration_mimo.py").write_text("raise SystemExit('code of the folder was run')")
    config = {"model_type": "mimo", "auto_map": REMOTE, "num_nextn_predict_layers": 1, "rope_theta": 640000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unnamed_type(str(tmp_path)) == "mimo"
    passed_on = str(tmp_path / "config.pickle")
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path), passed_on], check=True, timeout=120)
    # As a spawned scheduler gets it, which has registered nothing when it reads its arguments.
    subprocess.run([sys.executable, "-c", SPAWNED, passed_on], check=True, timeout=120)


def test_only_what_transformers_lacks_is_named(tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert not READ_AS.keys() & CONFIG_MAPPING_NAMES.keys(), "transformers has it now: take it out"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert unnamed_type(str(tmp_path)) is None and unnamed_type(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize("model_type", READ_AS)
def test_the_class_that_has_its_keys_is_there(model_type: str) -> None:
    import transformers

    assert hasattr(transformers, READ_AS[model_type])
