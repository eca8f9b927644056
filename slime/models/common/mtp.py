"""Multi-token prediction: one more layer that predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437,
section 2.2). Engines use it as the draft model for speculative decoding.

`h' = layer(eh_proj [enorm(embedding of token t + 1) ; hnorm(h_t)])`, where `h_t` is the input of the model's output
layer. The output layer, applied to the normed `h'`, predicts token t + 2. Embedding and output layer are the model's
own; DeepSeek and GLM checkpoints store both a second time. `HeadForm` describes how a family differs from the formula.

`Family.mtp_config` says how the layer is built. Its parameters are rows of the table only if it is trained
(`with_mtp`); otherwise its tensors are carried along.
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
"""Prefix of the layer's parameters in Megatron's names."""
LAYER_PREFIX = PREFIX + "transformer_layer."
CARRIED_DRAFT = r"draft\.(?!model\.embed_tokens\.weight$|lm_head\.weight$)"
"""Resident tensors of an untrained draft, except embedding and output layer, which it shares with the model."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How a family builds its multi-token prediction layer."""

    hidden_first: bool = False
    """The projection sees `[hnorm ; enorm]`."""
    blind_start: bool = False
    """The embedding is zero where `h_t` belongs to the first token of a sequence."""


def with_mtp(hf_config: HfConfig) -> HfConfig:
    """The config of a model with a trained multi-token prediction layer."""
    return {**hf_config, _KEY: True}


def trains_mtp(hf_config: HfConfig) -> bool:
    """Whether `with_mtp` made this config."""
    return bool(hf_config.get(_KEY))


def head_rows(hidden: int, names: tuple[str, str, str, str]) -> Rows:
    """The rows around the layer: norms and projection.

    `names`: HF names, without `weight`, of the embedding's norm, the hidden state's norm, the projection and the last
    norm. Engines use the same names unless `as_draft` changes them.
    """
    of_embedding, of_hidden, projection, last = names
    return (
        norm(f"{PREFIX}enorm", of_embedding, hidden),
        norm(f"{PREFIX}hnorm", of_hidden, hidden),
        copy(f"{PREFIX}eh_proj.weight", f"{projection}.weight", hidden, 2 * hidden),
        norm(f"{PREFIX}final_layernorm", last, hidden),
    )


def layer_rows(rows: Iterable[Row], hf: str, engine: str) -> Rows:
    """Adds the prefixes to the rows of the layer; `hf`, `engine`: the prefixes of HF and engine names."""
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
    """The same rows with the names that an engine reports for its draft; `renamed`: maps a name to the draft's own."""
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
    """The rows of layer `number`, behind the model's last layer, in DeepSeek and GLM checkpoints."""
    hf = f"model.layers.{number}."
    names = (f"{hf}enorm", f"{hf}hnorm", f"{hf}eh_proj", f"{hf}shared_head.norm")
    around = as_draft(head_rows(hidden, names), lambda name: name.replace(hf, "model."))
    return (*around[:-1], *layer_rows(layer, hf, f"{DRAFT}model.decoder."), around[-1])


def deepseek_duplicates(number: int) -> dict[str, str]:
    """The second embedding and output layer in DeepSeek and GLM checkpoints -> the first."""
    hf = f"model.layers.{number}."
    return {f"{hf}embed_tokens.weight": "model.embed_tokens.weight", f"{hf}shared_head.head.weight": "lm_head.weight"}


def carried_mtp(hf_config: HfConfig) -> tuple[str, ...]:
    """Patterns of multi-token prediction tensors in DeepSeek and GLM checkpoints, and of an engine's draft tensors."""
    first, count = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_nextn_predict_layers") or 0)
    return (*(rf"model\.layers\.{first + i}\." for i in range(count)), *((CARRIED_DRAFT,) if count else ()))


def only_layer(hf_config: HfConfig) -> HfConfig | None:
    """The config that builds layer 0 as the multi-token prediction layer, which always has experts; None without one.

    Raises `ConfigError` for several of them, because each would predict from the previous one.
    """
    count = int(hf_config.get("num_nextn_predict_layers") or 0)
    if count > 1:
        raise ConfigError(f"with num_nextn_predict_layers {count}, of which engines serve one")
    return {**hf_config, "first_k_dense_replace": 0, "mlp_layer_types": None} if count else None
