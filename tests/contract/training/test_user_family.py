"""A family in a file of the user's own is trained as one of slime's: a decoder that is Qwen3 under another name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.errors import ConfigError
from slime.models import FAMILIES
from tests.support.families import write_family
from tests.support.training import random_batch

SFT = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3}
FAMILY = '''
from megatron.core.transformer.attention import SelfAttention

from slime.models import FAMILIES, Family
from slime.models.common.packed_attention import packed_attention
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm

BUILT = []


class OwnAttention(SelfAttention):
    """Remembers that it was built."""

    def __init__(self, config, *given, **named):
        super().__init__(config, *given, **named)
        BUILT.append(self.layer_number)


@FAMILIES.register("house_model")
class HouseModel(Family):
    """Norms of q and k, and an attention of its own."""

    def departures(self, hf_config):
        return {"qk_layernorm": True}

    def weight_map(self, hf_config):
        return decoder_table(
            hf_config,
            lambda s, _: pre_norm(s.hidden_size, attention(s, qk_norm=True), mlp(s.hidden_size, s.intermediate_size)),
        )

    def attention(self, config, hf_config, layer, standard):
        return packed_attention(config, standard, OwnAttention)
'''


def test_a_file_is_a_family(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    qwen3 = write_family(tmp_path / "qwen3", "qwen3")
    own = tmp_path / "own"
    shutil.copytree(qwen3, own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "model_type": "house_model"}))
    file = tmp_path / "house.py"
    file.write_text(FAMILY)
    batch = random_batch(seed=3)
    want = make_backend(qwen3, **SFT).gradients(batch)
    with pytest.raises(ConfigError, match="house_model"):
        make_backend(own, **SFT)
    backend = make_backend(own, model_family=str(file), **SFT)
    got = backend.gradients(batch)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    module = __import__(FAMILIES.get("house_model").__module__)
    assert module.BUILT == [1, 2, 3, 4], "the family's own attention is in every layer"
