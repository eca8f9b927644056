"""The family is found by its `model_type`: architecture, weight map, and the settings of the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slime.core.hf_config import read_hf_config
from slime.models import architecture, table_for
from slime.settings import parse_args
from tests.support.command_line import complete

folder = Path(sys.argv[1])
words = complete(folder)
config_file = folder / "model" / "config.json"
assert "model.layers.1.self_attn.q_norm.weight" in set(table_for(read_hf_config(str(config_file.parent))).hf_names)
config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "model_type": "toy"}))
config = read_hf_config(str(config_file.parent))
assert architecture(config)["qk_layernorm"] is True
assert "model.layers.1.self_attn.q_norm.weight" in set(table_for(config).hf_names)
assert parse_args(words).megatron["qk_layernorm"] is True
