"""Assertions about a program: right programs pass, and no program passes that does not know the answer."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from slime.core.sample import Sample
from slime.rewards.assertions import names_in
from slime.rewards.graders import make_grader
from slime.rewards.program_sandbox import missing_here
from tests.support.marks import quick

HELD = not missing_here()


def grade(program: str, tests: Any, **metadata: Any) -> Any:
    response = f"```python\n{program}\n```"
    return make_grader("code").grade(Sample(response=response, metadata={"tests": tests, **metadata}), 30.0)


def in_one_interpreter(program: str, tests: list[str]) -> bool:
    """What plain Python says about a program that nobody has to fear."""
    space: dict[str, Any] = {}
    for source in (program, *tests):
        exec(compile(source, "one.py", "exec", dont_inherit=True), space)
    return True


NODES = """
class Node:
    def __init__(self, val, next=None):
        self.val, self.next = val, next

def of(values):
    head = None
    for value in reversed(values):
        head = Node(value, head)
    return head

def values(node):
    found = []
    while node is not None:
        found.append(node.val)
        node = node.next
    return found
"""
STACK = """
class Empty(LookupError):
    pass

class Stack:
    limit = 3
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty('nothing left', 0)
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __getitem__(self, index):
        return self.items[index]
    def __str__(self):
        return 'Stack' + str(self.items)
    def __eq__(self, other):
        return isinstance(other, Stack) and self.items == other.items
"""
RIGHT = {
    "plain": ("def f(x): return x * 2", ["assert f(2) == 4 and f('ab') == 'abab'", "assert f([1]) == [1, 1]"]),
    "keywords": ("def f(a, *, b=1, **more): return a + b + sum(more.values())", ["assert f(1, b=2, function=3) == 6"]),
    "kinds": (
        "def f(x): return x",
        [
            "for x in (None, True, -3, 2 ** 200, 0.1, float('inf'), 'ä\\ud800', b'\\x00\\xff', (1, (2,)), {1, 2}, {},"
            " {(1, 2): [3], None: {'a': ()}}, frozenset({'a'}), 2 + 3j, range(1, 9, 3), [[], [[]]], bytearray(b'a')):"
            "\n    assert f(x) == x and type(f(x)) is type(x), x",
            "assert f(float('nan')) != f(float('nan'))",
            "from decimal import Decimal\nfrom fractions import Fraction\nfrom datetime import datetime, date\n"
            "for x in (Decimal('1.20'), Fraction(2, 6), datetime(2020, 1, 2), date(2020, 1, 2)):\n    assert f(x) == x",
        ],
    ),
    "subclasses": (
        "from collections import Counter, OrderedDict, defaultdict, namedtuple\nfrom enum import IntEnum\n"
        "class Kind(IntEnum):\n    one = 1\n"
        "def f(): return [Counter('aab'), OrderedDict(a=1), namedtuple('P', 'x y')(1, 2), Kind.one]",
        ["assert f() == [{'a': 2, 'b': 1}, {'a': 1}, (1, 2), 1]"],
    ),
    "numbers": (
        "import math\ndef area(r): return math.pi * r * r",
        ["import math\nassert math.isclose(area(2), 12.566, rel_tol=0.001)", "assert abs(area(1) - math.pi) < 1e-9"],
    ),
    "errors": (
        "def f(x):\n    if x < 0: raise ValueError('negative', x)\n    return {}[x]",
        [
            "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('negative', -1)",
            "try:\n    f(1)\nexcept KeyError as error:\n    assert str(error) == '1'\nelse:\n    assert False",
        ],
    ),
    "in place": (
        "def f(board, seen):\n    board.sort()\n    board[0] = [9]\n    seen.add(1)",
        ["board, seen = [[3], [1], [2]], set()\nf(board, seen)\nassert board == [[9], [2], [3]] and seen == {1}"],
    ),
    "generators": (
        "import itertools\ndef f(n): return (i * i for i in range(n))\ndef g(): return itertools.count(5)",
        ["assert list(f(3)) == [0, 1, 4]", "numbers = g()\nassert [next(numbers), next(numbers)] == [5, 6]"],
    ),
    "callbacks": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef inc(x): return x + 1\n"
        "def safe(f):\n    try: return f()\n    except ZeroDivisionError as e: return type(e).__name__",
        [
            "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
            "assert apply(str, [1]) == ['1'] and apply(inc, (1,)) == [2] and apply(len, iter(['ab'])) == [2]",
            "assert apply(lambda x: inc(inc(x)), [1]) == [3]",
            "assert safe(lambda: 1 / 0) == 'ZeroDivisionError'",
        ],
    ),
    "classes": (
        STACK,
        [
            "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and list(s) == [1] and s[0] == 1",
            "assert str(Stack([1])) == 'Stack[1]' and f'{Stack([])}' == 'Stack[]'",
            "assert not Stack([]) and Stack([1]) and 1 in Stack([1]) and 2 not in Stack([1])",
            "try:\n    Stack().pop()\n    assert 0\nexcept Empty as e:\n    assert e.args == ('nothing left', 0)",
            "try:\n    Stack().pop()\n    assert False\nexcept LookupError:\n    pass",
            "s = Stack()\ns.items = [5]\nassert s.items == [5] and Stack.limit == 3 and isinstance(s, Stack)",
            "assert Stack([1]) == Stack((1,)) and Stack([1]) != Stack([2]) and not isinstance([], Stack)",
        ],
    ),
    "methods": (
        "class Solution:\n    def twice(self, x): return 2 * x",
        ["assert Solution().twice(4) == 8", "s = Solution()\nassert [s.twice(i) for i in range(3)] == [0, 2, 4]"],
    ),
    "objects of the test": (
        "def rotate(head):\n    node = head\n    while node.next is not None:\n        node = node.next\n"
        "    node.next, new = head, head.next\n    head.next = None\n    return new",
        [NODES + "assert values(rotate(of([1, 2, 3]))) == [2, 3, 1]"],
    ),
    "objects of the program": (
        "class Node:\n    def __init__(self, v, l=None, r=None):\n        self.v, self.l, self.r = v, l, r\n"
        "def depth(n): return 0 if n is None else 1 + max(depth(n.l), depth(n.r))",
        ["root = Node(1)\nroot.l = Node(2)\nroot.l.l = Node(3)\nassert depth(root) == 3 and root.l.l.v == 3"],
    ),
    "setup": ("def f(x): return x + 1", ["import math", "ONE = int(math.e) - 1", "assert f(ONE) == 2"]),
    "nested tests": (
        "def f(x): return x + 1",
        [
            "def test_it():\n    assert f(1) == 2\nclass TestF:\n    def run(self):\n        assert f(2) == 3\n"
            "test_it()\nTestF().run()"
        ],
    ),
    "a name of the test's own": ("def count(x): return len(x)", ["count = count([1, 2])\nassert count == 2"]),
    "numpy": (
        "import numpy as np\ndef f(n): return np.arange(n) * np.float64(2)\n"
        "def g(a): return a.T + a.shape[0]\ndef h(a): a += 1",
        [
            "assert np.allclose(f(3), [0, 2, 4])",
            "import numpy as np\nassert g(np.zeros((2, 3))).tolist() == [[2, 2]] * 3 and f(3).shape == (3,)",
            "import numpy as np\na = np.array([1, 2])\nh(a)\nassert (a == [2, 3]).all() and f(2).dtype == float",
        ],
    ),
    "dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "@dataclass\nclass P:\n    x: int\n    more: list[int] = field("
        "default_factory=list)\n    def f(self): return self.x + sum(self.more)",
        ["assert P(1) == P(1, []) != P(2) and P(1, [2]).f() == 3 and repr(P(1)) == 'P(x=1, more=[])'"],
    ),
    "annotations": (
        "def f(x: int): pass\ndef g(): return f.__annotations__['x'] is int",
        ["assert g() and f(1) is None"],
    ),
    "times": (
        "from datetime import time\ndef f(a, b): return b - a\ndef g(h): return time(h, 1)",
        [
            "from datetime import date, timedelta\nassert f(date(2020, 1, 1), date(2020, 1, 4)) == timedelta(days=3)",
            "from datetime import time, timedelta\nassert g(3) == time(3, 1) and f(timedelta(1), timedelta(2)).days",
        ],
    ),
    "named tuples and counters": (
        "from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\ndef f(c): return c.most_common(1)\n"
        "def g(s): return Counter(s)\ndef h(p): return p.x - p.y\ndef k(o, q): o.move_to_end('a'), q.append(3)",
        [
            "assert P(1, 2).x == 1 and P(y=1, x=2) == (2, 1) and g('aab')['z'] == 0",
            "from collections import Counter, namedtuple\nR = namedtuple('R', 'x y')\n"
            "assert f(g('aab')) == f(Counter('aab')) == [('a', 2)] and h(R(3, 2)) == 1",
            "from collections import OrderedDict, deque\no, q = OrderedDict(a=1, b=2), deque([1])\nk(o, q)\n"
            "assert list(o) == ['b', 'a'] and q == deque([1, 3])",
        ],
    ),
    "views and signs": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __neg__(self): return V(-self.x)\n"
        "    def __abs__(self): return abs(self.x)\n    def __int__(self): return self.x\n"
        "    def __float__(self): return float(self.x)\n    def __round__(self, n=None): return self.x\n"
        "def keys(): return {2: 3, 1: [4]}.keys()\ndef items(): return {2: 3, 1: [4]}.items()",
        [
            "assert keys() == {1: 2, 2: 1}.keys() and list(keys()) == [2, 1] and 1 in keys()",
            "assert items() == {1: [4], 2: 3}.items() and list(items()) == [(2, 3), (1, [4])]",
            "assert (-V(2)).x == -2 and abs(V(-2)) == 2 and int(V(3)) == 3 and float(V(3)) == 3.0 == round(V(3), 1)",
        ],
    ),
    "errors with attributes": (
        "class Coded(ValueError):\n    def __init__(self, code):\n        super().__init__(f'code {code}')\n"
        "        self.code = code\ndef f(x): raise Coded(x)",
        ["try:\n    f(3)\n    assert False\nexcept Coded as e:\n    assert e.code == 3 and str(e) == 'code 3'"],
    ),
}


@pytest.mark.parametrize("name", quick(RIGHT, "kinds", "objects of the test"))
def test_what_holds_in_one_interpreter_holds_from_outside(name: str) -> None:
    """Plain Python is the oracle: each program passes there. A wrong twin, which has the names alone, does not pass."""
    program, tests = RIGHT[name]
    assert in_one_interpreter(program, tests)
    assert grade(program, tests) == 1.0
    names = names_in(tests).free
    twin = "\n".join(f"class {name}:\n    def __init__(self, *args, **more): pass" for name in sorted(names))
    assert grade(twin, tests, code_reward="all") == 0.0


BEYOND = (
    "from pathlib import Path\nfrom array import array\nfrom collections import UserDict\nclass D:\n"
    "    def __init__(self, x): self.x = x\n    def __add__(self, other): return D(self.x + other)\n"
    "    def __contains__(self, x): return x == self.x\n    def __hash__(self): return 1\n"
    "    def __eq__(self, other): return True\n    def __enter__(self): return self\n"
    "    def __exit__(self, *error): pass\n    def __index__(self): return self.x\n"
    "def f(): print('said')\ndef path(): return Path('/a')\ndef numbers(): return array('i', [1])\n"
    "def data(): return UserDict(a=1)\nasync def later(): return 1\n",
    [
        "assert f.__name__ == 'f'",
        "assert path() == __import__('pathlib').Path('/a')",
        "assert numbers() == __import__('array').array('i', [1])",
        "assert data() == {'a': 1}",
        "assert __import__('asyncio').run(later()) == 1",
        "assert (D(1) + 1).x == 2",
        "assert 1 in D(1)",
        "assert hash(D(1)) == 1",
        "assert len({D(1), D(1)}) == 1",
        "assert 'ab'[D(1)] == 'b'",
        "assert type(D(1)) is D",
        "assert D(1).__dict__ == {'x': 1}",
        "with D(1) as one:\n    assert one.x == 1",
        "class E(D):\n    pass\nassert E(1).x == 1",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as said:\n    f()\n"
        "assert said.getvalue() == 'said\\n'",
    ],
)
"""What holds in one interpreter and cannot be found out from outside; `docs/graders.md` lists it."""


def test_what_cannot_be_asked_from_outside_fails() -> None:
    program, tests = BEYOND
    assert in_one_interpreter(program, tests)
    assert grade(program, tests) == 0.0


SQUARES = [
    "assert f(2) == 4",
    "assert 9 == f(3), 'no square'",
    "assert not f(4) != 16",
    "import math\nassert math.isclose(f(5), 25.0)",
    "assert abs(f(6) - 36) < 1e-6",
    "assert round(f(7), 3) == 49 and str(f(7)) == '49'",
    "assert 64 in [f(8)] and f(8) in {64}",
    "for got, wanted in zip(map(f, [9, 10]), [81, 100]):\n    assert got == wanted",
    "assert all(f(x) == x * x for x in range(11, 13))",
    "xs = [3, 1, 2]\nassert f(xs) == [x * x for x in xs]",
    "assert f(len([f, f])) == 4 and isinstance(f(13), int)",
    "assert list(f(range(2))) == [0, 1] and f(14) - 196 == 0",
]
ANY = "hits = []\n" + "".join(
    f"try:\n{textwrap.indent(statement, '    ')}\n    hits.append({number})\nexcept Exception:\n    pass\n"
    for number, statement in enumerate(SQUARES)
)
ANY += "assert hits, 'none of them'"
CHECK = "def check(candidate):\n    for x in (2, 3, -1):\n        assert candidate(x) == x * x\n"
SHARED = {
    "EVERY": """
class Yes:
    def __init__(self, *args): pass
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self
    def __iter__(self): return iter(())
    def __len__(self): return 1
    def __bool__(self): return True
    def __hash__(self): return 64
    def __int__(self): return 4
    __index__ = __int__
    def __float__(self): return 4.0
    def __str__(self): return '49'
for name in ('eq ne lt le gt ge contains instancecheck').split():
    setattr(Yes, f'__{name}__', lambda self, other=None: True)
for name in ('add sub mul truediv mod pow and or radd rsub rmul abs neg round trunc floor ceil getitem').split():
    setattr(Yes, f'__{name}__', lambda self, *others: self)
""",
    "DESCRIPTORS": """
import json, os
def each():
    for number in range(64):
        try: yield number, os.fstat(number)
        except OSError: pass
""",
}
"""What several attempts begin with."""
ATTEMPTS_TEXT = r"""
## an object that equals all
EVERY
def f(x): return Yes()
## an instance of a number that equals all
class Yes(int):
    __eq__ = __sub__ = __abs__ = __lt__ = lambda *a: True
    __hash__ = lambda s: 64
def f(x): return Yes(0)
## a list that equals all
EVERY
class Yess(list):
    __eq__ = lambda s, o: True
def f(x): return Yess([Yes()])
## a text that equals all
class T(str):
    __eq__ = lambda s, o: True
    __hash__ = str.__hash__
def f(x): return T('49')
## a class
EVERY
f = Yes
## an instance that is called
EVERY
f = Yes()
## the end of an iterator
def f(x): raise StopIteration
## the end of a generator
def f(x): raise GeneratorExit
## the end of the process
import sys
def f(x): sys.exit(0)
## a failed assertion
def f(x): raise AssertionError
## an empty iterator
def f(x): return iter(())
## not a number
def f(x): return float('nan')
## the argument, emptied
def f(x):
    if isinstance(x, list): x.clear()
    return []
## nothing, the argument emptied
def f(x):
    if isinstance(x, list): x.clear()
## built-in functions
import builtins
for name in ('abs all any isinstance len list map range round sorted str zip').split():
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return True
## names of the test
EVERY
abs = all = round = str = zip = map = list = isinstance = math = xs = got = wanted = Yes()
f = Yes()
## math
import math
math.isclose = lambda *a, **k: True
def f(x): return 0
## its modules
EVERY
import sys
for name in list(sys.modules):
    if name != 'sys': sys.modules[name] = Yes()
def f(x): return Yes()
## AssertionError
import builtins
class E(BaseException): pass
builtins.AssertionError = E
def f(x): return 0
## the compiler
import builtins
builtins.compile = lambda *a, **k: (lambda: 0).__code__
builtins.exec = lambda *a: None
def f(x): return 0
## check
def check(candidate): pass
def f(x): return 0
## whatever runs it
import sys
for module in list(sys.modules.values()):
    for name in dir(module):
        if name in ('check', 'serve', 'assertions', 'become', 'same_value', 'encode', 'Peer'):
            try: setattr(module, name, lambda *a, **k: True)
            except Exception: pass
def f(x): return True
## the encoder
import sys
Peer = sys.modules['slime.rewards.assertions'].Peer
Peer.encode = lambda self, value: {'yours': 0}
def f(x): return 0
## its tracer
import sys
def trace(frame, event, arg):
    frame.f_trace_opcodes = True
    return trace
sys.settrace(trace)
sys.setprofile(trace)
def f(x): return 0
## the frames above
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, dict) and 'statements' in value: return 4
            if isinstance(value, str) and 'assert f(' in value: return 4
        frame = frame.f_back
    return 0
## the garbage collector
import gc
def f(x):
    for value in gc.get_objects():
        try:
            if 'assert' in value.get('asserts', '') or 'statements' in value: return 4
        except Exception: pass
    return 0
## open descriptors
DESCRIPTORS
seen = b''
for number, _ in each():
    try:
        os.set_blocking(number, False)
        seen += os.pread(number, 100000, 0) if number != 1 else b''
    except OSError: pass
def f(x): return 4 if b'assert' in seen else 0
## files beside its own
import glob
seen = ''
for name in ('..', '/tmp', '/proc/self/cwd/..', '/proc/self/fd'):
    for path in glob.glob(name + '/**', recursive=True):
        try: seen += open(path).read()
        except Exception: pass
def f(x): return 4 if 'assert' in seen else 0
## its own memory
seen = b''
try:
    for line in open('/proc/self/maps'):
        low, high = (int(n, 16) for n in line.split()[0].split('-'))
        with open('/proc/self/mem', 'rb') as memory:
            memory.seek(low)
            seen += memory.read(high - low)
except Exception: pass
def f(x): return 4 if b'assert f(' in seen else 0
## the verdict into all descriptors
DESCRIPTORS
for number, _ in each():
    for text in (b'[true]', b'["' + b'0' * 32 + b'"]'):
        try: os.write(number, text)
        except OSError: pass
os._exit(0)
## the verdict at the end
DESCRIPTORS
import atexit, threading
def last():
    for number, _ in each():
        try: os.write(number, b'[true]')
        except OSError: pass
    os._exit(0)
atexit.register(last)
def f(x): last()
## a token that it reads
DESCRIPTORS
for number, _ in each():
    try: token = json.loads(os.pread(number, 10000, 0))['token']
    except Exception: continue
    for other, _ in each():
        try: os.write(other, json.dumps([token]).encode())
        except OSError: pass
os._exit(0)
## a token in the frames above
DESCRIPTORS
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'token' in value:
                for number, _ in each():
                    try: os.write(number, json.dumps([value['token']]).encode())
                    except OSError: pass
                os._exit(0)
        frame = frame.f_back
    return 0
## answers of its own
DESCRIPTORS
import struct
for message in ({'answer': {'f': {'mine': 0}}}, {'answer': {'value': {'yours': 0}}},
    {'answer': {'value': None, 'args': [[]]}}, {'answer': {'value': {'global': ['builtins', 'abs']}}},
    {'answer': {'value': {'ndarray': ['O', [1], [{'mine': 0}]]}}}, {'answer': {'value': {'namedtuple': ['P', ['__eq__'],
    [{'mine': 0}]]}}}, {'answer': {'raised': {'names': ['StopIteration'], 'args': []}}}, {'answer': {}}, [True]):
    data = json.dumps(message).encode()
    for number, _ in each():
        try: number > 2 and os.write(number, struct.pack('<I', len(data)) + data)
        except OSError: pass
import time
time.sleep(0.5)
os._exit(0)
## questions of its own
DESCRIPTORS
import struct
for do, args in (('get', ['__globals__']), ('call', []), ('__eq__', [4]), ('set', ['failure', None])):
    data = json.dumps({'do': do, 'target': {'yours': 0}, 'args': args, 'kwargs': {}}).encode()
    for number, _ in each():
        try: number > 2 and os.write(number, struct.pack('<I', len(data)) + data)
        except OSError: pass
def f(x): return 0
## nonsense
DESCRIPTORS
for number, _ in each():
    try: number > 2 and os.write(number, b'\xff' * 100)
    except OSError: pass
def f(x): return 0
## a deep answer
def f(x):
    deep = 4
    for _ in range(100000): deep = [deep]
    return deep
## a child that answers
import os
if os.fork(): os._exit(0)
def f(x): return 0
## an end in good order
import os
def f(x): os._exit(0)
## the end of all others
import os, signal
for pid in (os.getppid(), 1, 2, 3, -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
def f(x): return 0
"""
ATTEMPTS: dict[str, str] = {}
for _attempt in ATTEMPTS_TEXT.split("\n## ")[1:]:
    _name, _, _program = _attempt.partition("\n")
    _first, _, _rest = _program.partition("\n")
    ATTEMPTS[_name] = SHARED[_first] + _rest if _first in SHARED else _program


ONE_OF_A_KIND = (
    *("an object that equals all", "the end of the process", "names of the test", "whatever runs it"),
    *("the frames above", "the verdict into all descriptors", "answers of its own", "a child that answers"),
)
"""What runs with `make test`: an object, an end, a name, the interpreter, its frames, what it writes, and others."""


@pytest.mark.skipif(not HELD, reason="nothing holds a program on this machine")
@pytest.mark.parametrize("name", quick(ATTEMPTS, *ONE_OF_A_KIND))
def test_no_program_passes_that_does_not_know_the_answer(name: str) -> None:
    """Law: what a program does to itself, or says of itself, satisfies no assertion."""
    assert grade(ATTEMPTS[name], [ANY, CHECK + "check(f)"]) == 0.0
    if name == "check":
        assert grade(ATTEMPTS[name], CHECK, entry_point="f") == 0.0


def test_the_assertions_of_the_attempts_can_be_satisfied() -> None:
    """Otherwise no attempt would say anything."""
    square = "def f(x): return [v * v for v in x] if isinstance(x, list | range) else x * x"
    assert grade(square, SQUARES) == grade(square, ANY) == grade(square, CHECK, entry_point="f") == 1.0
    for name, program in ATTEMPTS.items():
        compile(program, name, "exec")
