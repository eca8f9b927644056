"""A fast tokenizer from a file of tiktoken, for released folders whose own tokenizer is Python code (Kimi-K2).

Such a folder has `tiktoken.model`, a line for each token with its bytes in base64 and its rank, and in
`tokenizer_config.json` the tokens that stand behind them, up to 256. The code beside them splits text by a pattern,
which neither file has: `PATTERNS` has it by the name of the class. Ids are those of tiktoken with that
pattern; ids without a name are `<|reserved_token_N|>`, as in the released code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.files import CONFIG, FAST, is_code, replace_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RANKS = "tiktoken.model"
KEPT = "tokenizer_config.released.json"
"""The released configuration, which names the code."""
NUM_RESERVED = 256
"""Ids behind those of the file."""
_WORD = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS: Mapping[str, str] = {
    "TikTokenTokenizer": "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_WORD}]*[\p{{Ll}}{_WORD}]+{_ENDING}",
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_WORD}]+[\p{{Ll}}{_WORD}]*{_ENDING}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}
"""Class that `tokenizer_config.json` names -> how its code splits text."""


def write_fast(folder: Path) -> int:
    """Writes `tokenizer.json` into a folder, and a `tokenizer_config.json` that names it; returns how many ids it has.

    Raises `ConfigError` for a folder whose tokenizer is not of this kind.
    """
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).is_file() else {}
    pattern = PATTERNS.get(str(config.get("tokenizer_class")))
    if not is_code(folder) or pattern is None or not (folder / RANKS).is_file():
        raise ConfigError(
            f"got {folder}, because of whose {CONFIG} (class {config.get('tokenizer_class')}) and {RANKS} it holds no "
            f"tokenizer of {', '.join(PATTERNS)} that is left to write; give a released folder of Kimi-K2"
        )
    tokenizer = fast_tokenizer(folder / RANKS, pattern, config.get("added_tokens_decoder") or {})
    own = {k: v for k, v in config.items() if k != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    replace_text(folder / FAST, tokenizer.to_str())
    replace_text(folder / KEPT, (folder / CONFIG).read_text())
    replace_text(folder / CONFIG, json.dumps(own, indent=2, ensure_ascii=False))
    return int(tokenizer.get_vocab_size())


def fast_tokenizer(ranks: Path, pattern: str, named: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """`named`: id -> what `added_tokens_decoder` says of it. Raises `ConfigError` for ids that are not behind the
    file's."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer: Tokenizer = TikTokenConverter(str(ranks), pattern=pattern).converted()
    first = tokenizer.get_vocab_size()
    if outside := sorted(int(i) for i in named if not first <= int(i) < first + NUM_RESERVED):
        raise ConfigError(f"got added tokens with ids {outside[:8]}, which are not the {NUM_RESERVED} behind {ranks}")
    behind = []
    for number in range(first, first + NUM_RESERVED):
        says = named.get(str(number)) or {}
        content, special = str(says.get("content", f"<|reserved_token_{number}|>")), bool(says.get("special", True))
        behind.append(AddedToken(content, special=special, normalized=False))
    tokenizer.add_tokens(behind)
    return tokenizer
