"""Multi-token prediction (MTP): an extra layer that predicts the token after the next one (DeepSeek-V3,
arXiv:2412.19437, section 2.2). Engines use it as the draft model for speculative decoding.

The layer computes `h' = layer(eh_proj [enorm(embedding of token t + 1) ; hnorm(h_t)])`, where `h_t` is the input of the
model's output layer. Applying the output layer to the normed `h'` predicts token t + 2. The layer shares the model's
embedding and output layer; DeepSeek and GLM checkpoints contain a second copy of both. `HeadForm` describes variants.

`Family.mtp_config` configures the layer. Its parameters have rows in the weight table only if the layer is trained
(`with_mtp`); otherwise its tensors are `FamilyTable.carried`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.rows import Rows, copy, decoder_table, norm, prefixed
from slime.models.common.table import DRAFT, FamilyTable, ModelSizes, Row, Spread

_KEY = "_trains_mtp"
PREFIX = "mtp.layers.0."
"""Megatron's name prefix of the layer's parameters."""
LAYER_PREFIX = PREFIX + "transformer_layer."
CARRIED_DRAFT = r"draft\.(?!model\.embed_tokens\.weight$|lm_head\.weight$)"
"""Matches the resident tensors of an untrained draft, except those that it shares with the model."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How a family's MTP layer differs from the formula above."""

    hidden_first: bool = False
    """The projection's input is `[hnorm ; enorm]`."""
    blind_start: bool = False
    """The embedding is replaced with zeros if `h_t` belongs to the first token of a sequence."""


def with_mtp(hf_config: HfConfig) -> HfConfig:
    """Returns the config, marked to say that its MTP layer is trained."""
    return {**hf_config, _KEY: True}


def trains_mtp(hf_config: HfConfig) -> bool:
    return bool(hf_config.get(_KEY))


def head_rows(hidden: int, names: tuple[str, str, str, str]) -> Rows:
    """Returns the rows of the parameters around the layer. `names`: HF names, without `weight`, of the embedding norm,
    the hidden-state norm, the projection and the final norm. Engines use the same names unless `as_draft` changes
    them."""
    of_embedding, of_hidden, projection, last = names
    return (
        norm(f"{PREFIX}enorm", of_embedding, hidden),
        norm(f"{PREFIX}hnorm", of_hidden, hidden),
        copy(f"{PREFIX}eh_proj.weight", f"{projection}.weight", hidden, 2 * hidden),
        norm(f"{PREFIX}final_layernorm", last, hidden),
    )


def layer_rows(rows: Iterable[Row], hf: str, engine: str) -> Rows:
    """Adds prefixes to the rows of the layer. `hf`, `engine`: prefixes of HF and engine names."""
    return prefixed(rows, LAYER_PREFIX, hf, engine)


def as_draft(rows: Iterable[Row], renamed: Callable[[str], str] = str) -> Rows:
    """Renames rows as engines do in drafts. `renamed`: maps a resident name to its name in the draft."""
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
    """Returns the rows of the MTP layer in DeepSeek and GLM checkpoints, stored as layer `number` after the others."""
    hf = f"model.layers.{number}."
    names = (f"{hf}enorm", f"{hf}hnorm", f"{hf}eh_proj", f"{hf}shared_head.norm")
    around = as_draft(head_rows(hidden, names), lambda name: name.replace(hf, "model."))
    return (*around[:-1], *layer_rows(layer, hf, f"{DRAFT}model.decoder."), around[-1])


def deepseek_duplicates(number: int) -> dict[str, str]:
    """Maps the second copies of the embedding and output layer in DeepSeek and GLM checkpoints to the first."""
    hf = f"model.layers.{number}."
    return {f"{hf}embed_tokens.weight": "model.embed_tokens.weight", f"{hf}shared_head.head.weight": "lm_head.weight"}


def carried_mtp(hf_config: HfConfig) -> tuple[str, ...]:
    """Returns patterns for the MTP layer's tensors in DeepSeek and GLM checkpoints and in the engine's draft."""
    first, count = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_nextn_predict_layers") or 0)
    return (*(rf"model\.layers\.{first + i}\." for i in range(count)), *((CARRIED_DRAFT,) if count else ()))


def table_with_mtp(
    hf_config: HfConfig,
    layer: Callable[[ModelSizes, int], Rows],
    mtp: Callable[[ModelSizes], Rows] | None,
    *,
    spread: Spread,
    carried: tuple[str, ...] = (),
) -> FamilyTable:
    """Returns `decoder_table` for DeepSeek and GLM checkpoints. `mtp`: rows of the trained MTP layer; None: the layer
    is `FamilyTable.carried`."""
    if mtp is None:
        return decoder_table(hf_config, layer, carried=(*carried_mtp(hf_config), *carried), spread=spread)
    sizes, number = ModelSizes.from_hf(hf_config), int(hf_config["num_hidden_layers"])
    rows, duplicates = deepseek_rows(mtp(sizes), sizes.hidden_size, number), deepseek_duplicates(number)
    return decoder_table(hf_config, layer, carried=carried, spread=spread, mtp=rows, duplicates=duplicates)


def only_layer(hf_config: HfConfig) -> HfConfig | None:
    """Returns a config whose layer 0 is the MTP layer, which always has experts, or None if there is none.

    Raises `ConfigError` for more than one MTP layer, because engines support only one.
    """
    count = int(hf_config.get("num_nextn_predict_layers") or 0)
    if count > 1:
        raise ConfigError(f"its num_nextn_predict_layers is {count}, but engines serve only one")
    return {**hf_config, "first_k_dense_replace": 0, "mlp_layer_types": None} if count else None
