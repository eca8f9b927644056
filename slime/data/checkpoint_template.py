"""The chat template and the tokenizer of a checkpoint, read from its files, for checks that must be fast.

Importing transformers takes seconds. Here the template runs in the same sandbox with the same functions
(`transformers.utils.chat_template_utils`; a test compares the two), and `tokenizers` counts tokens. Information that
is missing from the files is None, never a guess.
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
"""A folder with a tokenizer has at least one of these files."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class CheckpointTemplate:
    """A checkpoint's tokenizer and chat template, as its files describe them."""

    folder: Path
    has_tokenizer: bool
    has_template: bool
    """Whether there is a chat template, or a tokenizer that may provide one."""
    source: str | None
    """The text of the template; None without one, or if there are several and none is the default."""
    special_tokens: Mapping[str, str]
    """Name that a template may use, such as `bos_token` -> token."""

    @classmethod
    def of(cls, folder: Path) -> CheckpointTemplate:
        """Reads a checkpoint's small files. Raises `DataError` if one is damaged."""
        config = _json(folder / "tokenizer_config.json")
        named = config.get("chat_template")
        if isinstance(named, list):
            named = next((t.get("template") for t in named if t.get("name") == "default"), "")
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else named
        # Mistral's own tokenizer writes turns without a template.
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
        """Returns a copy with the user's template. Raises `DataError` if the file is not Jinja."""
        import jinja2

        try:
            source = file.read_text(encoding="utf-8")
            _compiled(source)
        except UnicodeDecodeError as error:
            raise DataError(f"--chat-template {file} is not UTF-8 ({error}); save it as UTF-8") from error
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"--chat-template {file} is not Jinja at line {error.lineno}: {error.message}; correct it"
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

        Raises `DataError` with the template's error if the template refuses the messages.
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
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        except Exception:  # the real tokenizer may define a function differently, so the text is unknown
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
        raise DataError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    """Returns the text of a token, which the file stores as a string or as an object with the text."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


@cache
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # transformers may read a format that this version of tokenizers cannot read
        return None


@cache
def _compiled(source: str) -> Any:
    """Compiles a template in transformers' sandbox."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text and does not change it."""

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
"""The file for the released configuration, which refers to Python code."""
NUM_RESERVED = 256
"""The number of special ids that follow the ids in the file."""
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
"""Class in `tokenizer_config.json` -> the pattern with which its code splits text."""


def write_fast(folder: Path) -> int:
    """Writes `tokenizer.json`, and a `tokenizer_config.json` that refers to it, into a released folder whose tokenizer
    is Python code over tiktoken's ranks (Kimi-K2). Returns the number of ids.

    `tiktoken.model` contains the bytes and rank of each token, `tokenizer_config.json` names up to 256 tokens after
    these, and `PATTERNS` has the pattern with which the code splits text. The ids equal those of tiktoken with that
    pattern. Ids without a name become `<|reserved_token_N|>`, as in the released code. Raises `ConfigError` for any
    other folder.
    """
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).is_file() else {}
    pattern = PATTERNS.get(str(config.get("tokenizer_class")))
    if not is_code(folder) or pattern is None or not (folder / RANKS).is_file():
        raise ConfigError(
            f"{folder} is not a released folder of Kimi-K2: its {CONFIG} must name the class {' or '.join(PATTERNS)} "
            f"(it names {config.get('tokenizer_class')}) and refer to Python code, beside a {RANKS}; pass such a folder"
        )
    tokenizer = fast_tokenizer(folder / RANKS, pattern, config.get("added_tokens_decoder") or {})
    own = {k: v for k, v in config.items() if k != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    replace_text(folder / FAST, tokenizer.to_str())
    replace_text(folder / KEPT, (folder / CONFIG).read_text())
    replace_text(folder / CONFIG, json.dumps(own, indent=2, ensure_ascii=False))
    return int(tokenizer.get_vocab_size())


def fast_tokenizer(ranks: Path, pattern: str, named: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """Builds the fast tokenizer. `named`: id -> its entry in `added_tokens_decoder`.

    Raises `ConfigError` for ids outside the reserved range.
    """
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer: Tokenizer = TikTokenConverter(str(ranks), pattern=pattern).converted()
    first = tokenizer.get_vocab_size()
    if outside := sorted(int(i) for i in named if not first <= int(i) < first + NUM_RESERVED):
        raise ConfigError(
            f"added tokens have ids {outside[:8]}, outside the {NUM_RESERVED} ids reserved after the tokens of "
            f"{ranks}; download the checkpoint again"
        )
    behind = []
    for number in range(first, first + NUM_RESERVED):
        says = named.get(str(number)) or {}
        content, special = str(says.get("content", f"<|reserved_token_{number}|>")), bool(says.get("special", True))
        behind.append(AddedToken(content, special=special, normalized=False))
    tokenizer.add_tokens(behind)
    return tokenizer
