"""Multi-token prediction: one more layer that predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437,
section 2.2), which engines serve as the draft of their speculative decoding.

`h' = layer(eh_proj [enorm(embedding of token t + 1) ; hnorm(h_t)])`, where `h_t` is what the model's output layer sees;
the output layer, applied to the normed `h'`, predicts token t + 2. Embedding and output layer are the model's own;
files of DeepSeek and GLM hold both a second time. `HeadForm` says where a family departs from the formula.

A family says in `Family.mtp_config` how the layer is built. Its parameters are rows of the table only where it is
trained (`with_mtp`); else its tensors are carried along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.rows import Rows, copy, norm
from slime.models.common.table import DRAFT, Row

_KEY = "_trains_mtp"
PREFIX = "mtp.layers.0."
"""Of its parameters, in Megatron's own words."""
LAYER_PREFIX = PREFIX + "transformer_layer."
CARRIED_DRAFT = r"draft\.(?!model\.embed_tokens\.weight$|lm_head\.weight$)"
"""Resident tensors of a draft that is not trained: all but those that it has from the model."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How a family puts its layer together."""

    hidden_first: bool = False
    """The projection sees `[hnorm ; enorm]`."""
    blind_start: bool = False
    """The embedding is zero where `h_t` is of the first token of a sequence."""


def with_mtp(hf_config: HfConfig) -> HfConfig:
    """The config of a model whose layer of multi-token prediction is trained."""
    return {**hf_config, _KEY: True}


def trains_mtp(hf_config: HfConfig) -> bool:
    """Whether a config is one of `with_mtp`."""
    return bool(hf_config.get(_KEY))


def head_rows(hidden: int, names: tuple[str, str, str, str]) -> Rows:
    """What stands around the layer; `names`: HF names, without `weight`, of the norm of the embedding, that of the
    hidden state, the projection and the last norm. Engines have these names, too, unless `as_draft` changes them.
    """
    of_embedding, of_hidden, projection, last = names
    return (
        norm(f"{PREFIX}enorm", of_embedding, hidden),
        norm(f"{PREFIX}hnorm", of_hidden, hidden),
        copy(f"{PREFIX}eh_proj.weight", f"{projection}.weight", hidden, 2 * hidden),
        norm(f"{PREFIX}final_layernorm", last, hidden),
    )


def layer_rows(rows: Iterable[Row], hf: str, engine: str) -> Rows:
    """The rows of the layer, without prefixes yet, under their full names; `hf`, `engine`: what stands before."""
    return tuple(
        dataclasses.replace(
            row,
            megatron=LAYER_PREFIX + row.megatron,
            hf=tuple(hf + name for name in row.hf),
            engine=engine + row.engine,
            engines=tuple(engine + name for name in row.engines),
        )
        for row in rows
    )


def as_draft(rows: Iterable[Row], renamed: Callable[[str], str] = str) -> Rows:
    """The same with the names that an engine reports of its draft; `renamed`: how the draft itself calls a tensor."""
    return tuple(
        dataclasses.replace(
            row,
            engine=DRAFT + renamed(row.engine),
            engines=tuple(DRAFT + renamed(name) for name in row.engines),
            plus_one=DRAFT + renamed(row.plus_one) if row.plus_one else "",
        )
        for row in rows
    )


def deepseek_rows(layer: Rows, hidden: int, number: int) -> Rows:
    """Of layer `number` in files of DeepSeek and GLM, behind the model's last one."""
    hf = f"model.layers.{number}."
    names = (f"{hf}enorm", f"{hf}hnorm", f"{hf}eh_proj", f"{hf}shared_head.norm")
    around = as_draft(head_rows(hidden, names), lambda name: name.replace(hf, "model."))
    return (*around[:-1], *layer_rows(layer, hf, f"{DRAFT}model.decoder."), around[-1])


def deepseek_duplicates(number: int) -> dict[str, str]:
    """What such files hold of embedding and output layer a second time -> the first."""
    hf = f"model.layers.{number}."
    return {f"{hf}embed_tokens.weight": "model.embed_tokens.weight", f"{hf}shared_head.head.weight": "lm_head.weight"}


def carried_mtp(hf_config: HfConfig) -> tuple[str, ...]:
    """Patterns of what such files hold for multi-token prediction, and of the draft that an engine makes of it."""
    first, count = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_nextn_predict_layers") or 0)
    return (*(rf"model\.layers\.{first + i}\." for i in range(count)), *((CARRIED_DRAFT,) if count else ()))


def only_layer(hf_config: HfConfig) -> HfConfig | None:
    """Layer 0 as such a layer, which always has experts; None if files have none.

    Raises `ConfigError` for several, of which each predicts from the one before it.
    """
    count = int(hf_config.get("num_nextn_predict_layers") or 0)
    if count > 1:
        raise ConfigError(f"with num_nextn_predict_layers {count}, of which engines serve one")
    return {**hf_config, "first_k_dense_replace": 0, "mlp_layer_types": None} if count else None
