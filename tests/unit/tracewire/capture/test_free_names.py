"""Which names a body takes from around it, told by the order in which it runs."""

from __future__ import annotations

import ast

import pytest

from tracewire.capture.free_names import FreeNames

CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "read only": ("y = x", {"x"}, set()),
    "read, then bound": ("x = x + 1", set(), {"x"}),
    "bound, then read": ("x = 1\ny = x", set(), set()),
    "augmented": ("x += y", {"y"}, {"x"}),
    "annotated": ("x: T = a\nz: T\nw = x, z", {"a", "z"}, set()),
    "several targets": ("(a, [b, *c]) = d[0].e = f\ng = a, b, c", {"d", "f"}, set()),
    "a loop's own": ("for i in xs:\n    h = i\n    f(h)", {"xs", "f"}, set()),
    "after a loop that may not run": ("for i in xs:\n    h = i\nf(h)", {"xs", "f"}, {"h"}),
    "a loop's else": ("for i in xs:\n    pass\nelse:\n    y = i", {"xs"}, {"i"}),
    "while": ("while (n := f()) > 1:\n    m = n\nm", {"f"}, {"m"}),
    "both branches": ("if a:\n    x = 1\nelse:\n    x = 2\nx", {"a"}, set()),
    "one branch": ("if a:\n    x = 1\nx", {"a"}, {"x"}),
    "with": ("with a() as b:\n    c = b\nc", {"a"}, set()),
    "try": ("try:\n    x = f()\nexcept E as e:\n    x = e\nx, e", {"f", "E"}, {"e"}),
    "finally": ("try:\n    x = 1\nfinally:\n    y = x\nx", set(), {"x"}),
    "match": (
        "match a:\n    case C(b, k=[*r]) | {v.w: b, **r}:\n        y = b, r\n    case u if z:\n        u",
        {"a", "C", "v", "z"},
        set(),
    ),
    "comprehensions": ("[x + y for x in xs if z for _ in w]\n{k: v for k, v in m}", {"y", "xs", "z", "w", "m"}, set()),
    "a walrus in one": ("[q := x for x in xs]\nq", {"xs"}, set()),
    "a function": ("def f(a, b=c, *d, e, **g):\n    h = a + i + b\n    return h, d, e, g\nf", {"c", "i"}, set()),
    "a function that reads what is bound later": ("def f():\n    return x\nx = 1", set(), {"x"}),
    "a decorator": ("@d\ndef f(): ...", {"d"}, set()),
    "a lambda": ("f = lambda a, b=c: a + b + d", {"c", "d"}, set()),
    "a class": ("class A(B, metaclass=M):\n    x = y\n    z = x\nA", {"B", "M", "y"}, set()),
    "imports": ("import a.b, c as d\nfrom e import f as g\na, d, g", set(), set()),
    "deleted": ("x = 1\ndel x\nx", set(), {"x"}),
    "an f-string": ("f'{a} {b!r:{c}}'", {"a", "b", "c"}, set()),
    "attributes and items": ("a.b[c].d = e", {"a", "c", "e"}, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_free_names(case: str) -> None:
    source, required, possible = CASES[case]
    names = FreeNames(ast.parse(source).body)
    assert set(names.required) == required
    assert set(names.possible) == possible


def test_a_name_has_the_line_of_its_first_use() -> None:
    assert FreeNames(ast.parse("y = 1\nf(\n    x)\nx").body).required == {"f": 2, "x": 3}
