"""Reads a checkpoint's chat template and tokenizer from its files, without importing transformers.

Importing transformers takes seconds, which is too slow for startup checks. Here, the template runs in the same Jinja
sandbox with the same functions (`transformers.utils.chat_template_utils`; a test compares the two), and `tokenizers`
counts tokens. Anything that the files do not say is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError, DataError
from slime.core.files import CONFIG, FAST, is_code, replace_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json", "*.tiktoken")
"""A folder with a tokenizer contains at least one of these files."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class CheckpointTemplate:
    """What the files of a checkpoint say about its tokenizer and chat template."""

    folder: Path
    has_tokenizer: bool
    has_template: bool
    """Whether there is a chat template, or a tokenizer that may come with one."""
    source: str | None
    """The template's source; None without a template, or if there are several and none is named `default`."""
    special_tokens: Mapping[str, str]
    """Variable in the template, such as `bos_token` -> token."""

    @classmethod
    def of(cls, folder: Path) -> CheckpointTemplate:
        """Reads the JSON and template files of a checkpoint. Raises `DataError` if one is damaged."""
        config = _json(folder / "tokenizer_config.json")
        named = config.get("chat_template")
        if isinstance(named, list):
            named = next((t.get("template") for t in named if t.get("name") == "default"), "")
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else named
        # Mistral's own tokenizer (tekken.json) renders chats without a template.
        brings_one = (folder / "tekken.json").is_file() or (folder / "additional_chat_templates").is_dir()
        tokens = {**_json(folder / "special_tokens_map.json"), **config}
        return cls(
            folder=folder,
            has_tokenizer=any(any(folder.glob(pattern)) for pattern in _TOKENIZERS),
            has_template=bool(source) or named is not None or brings_one,
            source=source or None,
            special_tokens={name: _token(tokens[name]) for name in _SPECIAL if tokens.get(name)},
        )

    def with_template(self, file: Path) -> CheckpointTemplate:
        """Returns a copy that uses the template in `file`. Raises `DataError` if it is not valid Jinja."""
        import jinja2

        try:
            source = file.read_text(encoding="utf-8")
            _compiled(source)
        except UnicodeDecodeError as error:
            raise DataError(f"--chat-template {file} is not UTF-8 ({error}); save it as UTF-8") from error
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"--chat-template {file} is not valid Jinja (line {error.lineno}: {error.message}); correct it"
            ) from error
        return dataclasses.replace(self, has_template=True, source=source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str | None:
        """Renders a conversation. Returns None if only the real tokenizer can render it.

        Raises `DataError` with the template's error if the template rejects the messages.
        """
        import jinja2

        if self.source is None:
            return None
        try:
            template = _compiled(self.source)
        except jinja2.TemplateError:
            return None
        given = {**self.special_tokens, **kwargs, "add_generation_prompt": add_generation_prompt}
        try:
            return str(template.render(messages=messages, tools=tools or None, documents=None, **given))
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template rejects the messages: {type(error).__name__}: {error}") from error
        except Exception:  # the template may work with the real tokenizer, so the result is unknown
            return None

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """Counts the tokens of each text. Returns None without a `tokenizer.json`."""
        tokenizer = _tokenizer(self.folder / "tokenizer.json")
        if tokenizer is None:
            return None
        return [len(encoded.ids) for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); download the checkpoint again") from error
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    """Returns the text of a token, which files store as a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


@cache
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # transformers can read formats that tokenizers alone cannot
        return None


@cache
def _compiled(source: str) -> Any:
    """Compiles a template in transformers' sandbox."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Ignores `{% generation %}` tags, which mark assistant text without changing it."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment.from_string(source)


# ---- fast tokenizers from tiktoken files -------------------------------------------------------------------------

RANKS = "tiktoken.model"
KEPT = "tokenizer_config.released.json"
"""Backup of the released configuration, which refers to Python code."""
NUM_RESERVED = 256
"""Number of special ids after those in the file."""
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
"""Class name in `tokenizer_config.json` -> the regular expression that its code uses to split text."""


def write_fast(folder: Path) -> int:
    """Adds a fast tokenizer (`tokenizer.json` and a matching `tokenizer_config.json`) to a released checkpoint with a
    tiktoken tokenizer in Python code (Kimi-K2). Returns the vocabulary size.

    `tiktoken.model` has the bytes and rank of each token, `tokenizer_config.json` names up to 256 special tokens after
    them, and `PATTERNS` has the code's regular expression for splitting text. The ids equal those of tiktoken.
    Reserved ids without a name become `<|reserved_token_N|>`, as in the released code. Raises `ConfigError` for any
    other folder.
    """
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).is_file() else {}
    pattern = PATTERNS.get(str(config.get("tokenizer_class")))
    if not is_code(folder) or pattern is None or not (folder / RANKS).is_file():
        raise ConfigError(
            f"{folder} is not a released Kimi-K2 checkpoint: {CONFIG} must refer to Python code with the class "
            f"{' or '.join(PATTERNS)} (got {config.get('tokenizer_class')}), next to a {RANKS}; pass such a folder"
        )
    tokenizer = fast_tokenizer(folder / RANKS, pattern, config.get("added_tokens_decoder") or {})
    own = {k: v for k, v in config.items() if k != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    replace_text(folder / FAST, tokenizer.to_str())
    replace_text(folder / KEPT, (folder / CONFIG).read_text())
    replace_text(folder / CONFIG, json.dumps(own, indent=2, ensure_ascii=False))
    return int(tokenizer.get_vocab_size())


def fast_tokenizer(ranks: Path, pattern: str, named: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """Builds the fast tokenizer. `named` maps ids to their entries in `added_tokens_decoder`.

    Raises `ConfigError` if an id is outside the reserved range.
    """
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer: Tokenizer = TikTokenConverter(str(ranks), pattern=pattern).converted()
    first = tokenizer.get_vocab_size()
    if outside := sorted(int(i) for i in named if not first <= int(i) < first + NUM_RESERVED):
        raise ConfigError(
            f"the added tokens {outside[:8]} are outside the {NUM_RESERVED} ids reserved after the tokens of {ranks}; "
            "download the checkpoint again"
        )
    behind = []
    for number in range(first, first + NUM_RESERVED):
        says = named.get(str(number)) or {}
        content, special = str(says.get("content", f"<|reserved_token_{number}|>")), bool(says.get("special", True))
        behind.append(AddedToken(content, special=special, normalized=False))
    tokenizer.add_tokens(behind)
    return tokenizer
