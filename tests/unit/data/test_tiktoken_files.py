"""A tokenizer.json that is written from a file of tiktoken gives the ids of tiktoken."""

from __future__ import annotations

import base64
import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from transformers import AutoTokenizer

from slime.cli.main import main
from slime.core.errors import ConfigError
from slime.core.files import is_code
from slime.data.checkpoint_template import KEPT, PATTERNS, write_fast
from tests.support.command_line import complete, refused

TEXT = (
    "The quick brown fox doesn't jump over 12345 lazy dogs; THEY'LL say: «Ça va ?» — naïve façade.\r\n\r\n"
    "    def main(argv):\n\treturn argv[1:]  # ok\n月の明かりが綺麗ですね。机器学习模型的训练需要3.14159个GPU小时。"
    "Съешь ещё этих мягких французских булок, да выпей чаю! 😀👍🏽 ǅungla ʰello मुझे हिन्दी पसंद है\n"
)
PIECES = [*TEXT, " ", "  ", "\n\n", "'s", "'LL", "汉字abc", "Abc汉", "ab汉cd", "123", "\u00a0", "\u3000", "<|im_end|>"]
NAMED = {"[BOS]": (0, True), "[EOS]": (1, True), "<|im_end|>": (2, True), "<|tool|>": (5, False)}
"""Content -> (place behind the file's ids, whether it is special)."""


def learnt_ranks(num_merges: int = 150) -> dict[bytes, int]:
    """Byte pairs that stand together most often in the text, one after the other."""
    ranks = {bytes([i]): i for i in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in (TEXT * 2).replace(" ", " \0").split("\0")]
    for _ in range(num_merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(best[0] + best[1], len(ranks))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return ranks


@pytest.fixture
def released(tmp_path: Path) -> tuple[Path, dict[bytes, int]]:
    """A folder as that of Kimi-K2, and its ranks."""
    ranks, folder = learnt_ranks(), tmp_path / "released"
    folder.mkdir()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    named = {str(len(ranks) + i): {"content": name, "special": special} for name, (i, special) in NAMED.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, ranks


def test_ids_are_those_of_tiktoken(released: tuple[Path, dict[bytes, int]]) -> None:
    folder, ranks = released
    specials = {name: len(ranks) + i for name, (i, _) in NAMED.items()}
    oracle = tiktoken.Encoding(
        "oracle", pat_str=PATTERNS["TikTokenTokenizer"], mergeable_ranks=ranks, special_tokens=specials
    )
    assert main(["tokenizer", str(folder)]) == 0 and not is_code(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(ranks) + 256
    rng = random.Random(0)
    texts = [TEXT, *("".join(rng.choices(PIECES, k=rng.randint(1, 40))) for _ in range(3000))]
    for text in texts:
        want = oracle.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == want, repr(text)
        assert tokenizer.decode(want) == text


def test_what_the_released_configuration_says_is_kept(released: tuple[Path, dict[bytes, int]]) -> None:
    folder, ranks = released
    before = (folder / "tokenizer_config.json").read_text()
    write_fast(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOS]", "[EOS]")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|reserved_token_" + str(len(ranks) + 4) + "|>") == len(ranks) + 4
    spoken = tokenizer.decode([len(ranks) + i for i in (1, 2, 5)], skip_special_tokens=True)
    assert spoken == "<|tool|>", "only what is special is left out"
    assert (folder / KEPT).read_text() == before


def test_another_folder_is_refused(released: tuple[Path, dict[bytes, int]]) -> None:
    folder, _ = released
    write_fast(folder)
    with pytest.raises(ConfigError, match="Kimi-K2"):
        write_fast(folder)


def test_a_run_with_a_tokenizer_of_code_is_refused_with_what_to_do(
    tmp_path: Path, released: tuple[Path, dict[bytes, int]]
) -> None:
    folder, _ = released
    words = complete(tmp_path)
    shutil.copy(Path(words[words.index("--hf-checkpoint") + 1]) / "config.json", folder)
    words[words.index("--hf-checkpoint") + 1] = str(folder)
    assert f"slime tokenizer {folder}" in refused(words)
    write_fast(folder)
    assert "slime tokenizer" not in refused([*words, "--lr", "-1"])
