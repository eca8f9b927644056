"""A dozen small repositories. Each has one bug, an issue that describes it, and visible tests that show it.

The hidden tests are calls with their expected values. Calls in `fixes` fail as long as the bug exists; calls in `keeps`
pass before and after the repair. No hidden test occurs in a visible test, so no value can be copied from there.

Invariant: `answer` passes all hidden tests of its task, and `files` fails all of its `fixes` (tests/unit/project).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..demo.task import write_jsonl

Calls = tuple[tuple[list[Any], Any], ...]
"""Arguments, and the expected value."""


@dataclass(frozen=True)
class Task:
    """One repository."""

    function: str
    """`module.name` of the function with the bug."""
    issue: str
    answer: str
    """The file of the function, without the bug."""
    right: str
    """A part of `answer`, which `wrong` replaces."""
    wrong: str
    """The buggy text in place of `right`."""
    shown: Calls
    """Calls of the visible tests."""
    fixes: Calls
    keeps: Calls
    more: dict[str, str] = field(default_factory=dict)
    """Additional files: path -> text."""

    @property
    def module(self) -> str:
        return self.function.rpartition(".")[0]

    @property
    def path(self) -> str:
        """Returns the path of the file with the bug."""
        return self.module.replace(".", "/") + ".py"

    @property
    def files(self) -> dict[str, str]:
        """Returns the repository that the agent gets: path -> text."""
        broken = self.answer.replace(self.right, self.wrong)
        assert broken != self.answer, f"{self.function}: the bug is in the file"
        return {**self.more, self.path: broken, f"test_{self.module.rpartition('.')[2]}.py": self.visible_tests()}

    def visible_tests(self) -> str:
        """Returns a unittest module."""
        name = self.function.rpartition(".")[2]
        checks = [
            f"        self.assertEqual({name}({', '.join(map(repr, given))}), {wanted!r})\n"
            for given, wanted in self.shown
        ]
        head = f"import unittest\n\nfrom {self.module} import {name}\n\n\nclass Tests(unittest.TestCase):\n"
        return f"{head}    def test_{name}(self):\n{''.join(checks)}"

    def row(self, harness: str) -> dict[str, Any]:
        """Returns one row of the dataset."""
        hidden = {"function": self.function, "fixes": self.fixes, "keeps": self.keeps}
        return {
            "prompt": [{"role": "user", "content": self.issue}],
            "label": self.function,
            "metadata": {"files": self.files, "hidden": hidden, "harness": harness},
        }


TASKS = (
    Task(
        "sums.add",
        "add(2, 3) is -1, but it should be 5: it should add its two numbers.",
        "def add(a, b):\n    return a + b\n",
        "a + b",
        "a - b",
        shown=(([2, 3], 5), ([10, 1], 11)),
        fixes=(([4, 9], 13), ([-3, -4], -7)),
        keeps=(([7, 0], 7),),
    ),
    Task(
        "parity.is_even",
        "is_even(4) is False, but it should be True: it should say whether a number is even.",
        "def is_even(n):\n    return n % 2 == 0\n",
        "== 0",
        "== 1",
        shown=(([4], True), ([3], False)),
        fixes=(([18], True), ([0], True), ([7], False)),
        keeps=(),
    ),
    Task(
        "compare.larger",
        "larger(1, 5) is 1, but it should be 5: it should return the larger number.",
        "def larger(a, b):\n    if a > b:\n        return a\n    return b\n",
        "a > b",
        "a < b",
        shown=(([1, 5], 5), ([9, 2], 9)),
        fixes=(([3, 30], 30), ([-1, -8], -1)),
        keeps=(([6, 6], 6),),
    ),
    Task(
        "items.last",
        'last(["a", "b"]) is "a", but it should be "b": it should return the last item.',
        "def last(items):\n    return items[-1]\n",
        "items[-1]",
        "items[0]",
        shown=(([["a", "b"]], "b"), ([[1, 2, 3]], 3)),
        fixes=(([[5, 6, 7, 8]], 8), ([["x", "y", "z"]], "z")),
        keeps=(([["one"]], "one"),),
    ),
    Task(
        "shapes.area",
        "area(3, 4) is 7, but it should be 12: the area of a rectangle is its width times its height.",
        "def area(width, height):\n    return width * height\n",
        "width * height",
        "width + height",
        shown=(([3, 4], 12), ([1, 5], 5)),
        fixes=(([6, 7], 42), ([10, 1], 10)),
        keeps=(([2, 2], 4),),
    ),
    Task(
        "greeting.greet",
        'greet("Ada") is "Hello, name!", but it should be "Hello, Ada!": it should greet by the name.',
        'def greet(name):\n    return "Hello, " + name + "!"\n',
        "+ name +",
        '+ "name" +',
        shown=((["Ada"], "Hello, Ada!"),),
        fixes=((["Grace"], "Hello, Grace!"), ([""], "Hello, !")),
        keeps=((["name"], "Hello, name!"),),
    ),
    Task(
        "money.total",
        "total([1, 2]) is 4, but it should be 3: it should be the sum of the numbers.",
        "def total(numbers):\n    result = 0\n    for one in numbers:\n        result += one\n    return result\n",
        "result = 0",
        "result = 1",
        shown=(([[1, 2]], 3), ([[]], 0)),
        fixes=(([[4, 5, 6]], 15), ([[-2]], -2)),
        keeps=(),
    ),
    Task(
        "letters.count_vowels",
        'count_vowels("music") is 1, but it should be 2: the letter u is a vowel, too.',
        'def count_vowels(text):\n    return sum(letter in "aeiou" for letter in text)\n',
        '"aeiou"',
        '"aeio"',
        shown=((["music"], 2), (["cat"], 1)),
        fixes=((["unusual"], 4), (["guru"], 2)),
        keeps=((["banana"], 3), (["rhythm"], 0)),
    ),
    Task(
        "words.first_word",
        'first_word("red green") is "red green", but it should be "red": words are parted by spaces.',
        'def first_word(text):\n    return text.split(" ")[0]\n',
        'split(" ")',
        'split(",")',
        shown=((["red green"], "red"), (["a b c"], "a")),
        fixes=((["one two"], "one"), (["to be or not"], "to")),
        keeps=((["alone"], "alone"),),
    ),
    Task(
        "limits.clamp",
        "clamp(9, 0, 5) is 9, but it should be 5: a number above the limit should become the limit.",
        "def clamp(x, a, b):\n    if x < a:\n        return a\n    if x > b:\n        return b\n    return x\n",
        "        return b\n",
        "        return x\n",
        shown=(([9, 0, 5], 5), ([3, 0, 5], 3)),
        fixes=(([100, -1, 1], 1), ([8, 2, 4], 4)),
        keeps=(([-7, -3, 3], -3), ([2, 1, 9], 2)),
    ),
    Task(
        "weather.convert.to_celsius",
        "to_celsius(212) is 324.0, but it should be 100.0. The degrees above freezing are to be multiplied by 5/9.",
        "from weather.scale import FREEZING\n\n\ndef to_celsius(degrees):\n    return (degrees - FREEZING) * 5 / 9\n",
        "* 5 / 9",
        "* 9 / 5",
        shown=(([212], 100.0),),
        fixes=(([50], 10.0), ([-40], -40.0)),
        keeps=(([32], 0.0),),
        more={"weather/__init__.py": "", "weather/scale.py": "FREEZING = 32\n"},
    ),
    Task(
        "shop.cart.price",
        'price(["tea", "tea"]) is 3, but it should be 6: each item is paid for, also when it is in the cart twice.',
        "from shop.catalogue import PRICES\n\n\ndef price(items):\n    return sum(PRICES[item] for item in items)\n",
        "for item in items",
        "for item in set(items)",
        shown=(([["tea", "tea"]], 6), ([["tea"]], 3)),
        fixes=(([["jam", "jam", "tea"]], 13), ([["nut", "nut", "nut"]], 6)),
        keeps=(([["jam", "nut"]], 7), ([[]], 0)),
        more={"shop/__init__.py": "", "shop/catalogue.py": 'PRICES = {"tea": 3, "jam": 5, "nut": 2}\n'},
    ),
)


def write_rows(path: Path, harness: str) -> Path:
    """Writes the dataset, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, (task.row(harness) for task in TASKS))
    return path
