"""MiMo-7B: Qwen2's decoder plus an MTP layer with different names."""

from __future__ import annotations

from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.mtp import CARRIED_DRAFT, HeadForm, as_draft, head_rows, layer_rows, only_layer, trains_mtp
from slime.models.common.rows import Rows, attention, decoder_table, mlp, pre_norm
from slime.models.common.table import DRAFT, PLAIN, FamilyTable, ModelSizes, Spread
from slime.models.qwen2 import Qwen2

_HF = "model.mtp_layers.0."
"""HF name prefix of the MTP layer."""


@FAMILIES.register("mimo")
class MiMo(Qwen2):
    """The MTP projection's input is `[hidden ; embedding]`. SGLang's draft zeroes the embedding at sequence starts."""

    mtp_form = HeadForm(hidden_first=True, blind_start=True)

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        mtp = _mtp_rows(hf_config) if trains_mtp(hf_config) else ()
        has_one = bool(hf_config.get("num_nextn_predict_layers"))
        carried = (_HF.replace(".", r"\."), CARRIED_DRAFT) if has_one and not mtp else ()
        return decoder_table(hf_config, _layer, carried=carried, spread=self.spread(hf_config), mtp=mtp)

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        return only_layer(hf_config)

    def spread(self, hf_config: HfConfig) -> Spread:
        """Does not support pipeline stages, unlike Qwen2."""
        return PLAIN


def _layer(s: ModelSizes, _: int) -> Rows:
    return pre_norm(s.hidden_size, attention(s, qkv_bias=True), mlp(s.hidden_size, s.intermediate_size))


def _mtp_rows(hf_config: HfConfig) -> Rows:
    """Returns the rows of the MTP layer. In the draft, it is `mtp_block`; norms and projection are outside of it."""
    s = ModelSizes.from_hf(hf_config)
    names = (f"{_HF}token_layernorm", f"{_HF}hidden_layernorm", f"{_HF}input_proj", f"{_HF}final_layernorm")
    *before, last = as_draft(head_rows(s.hidden_size, names), lambda name: name.replace(_HF, "model."))
    return (*before, *layer_rows(_layer(s, 0), _HF, f"{DRAFT}model.mtp_block."), last)
