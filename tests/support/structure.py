"""The structure of the packages, in figures.

    python -m tests.support.structure [--json]

Prints the longest class, function and parameter list, the circles of imports (those under `TYPE_CHECKING` and inside
functions included), the modules without a test at their mirrored path, and how many modules each folder holds. Exits
with 1 if a class has more than 400 lines, a function more than 60, a parameter list more than 8, or if there is a
circle. A comment `# whole: REASON` on the line above a class or function excuses its length.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT

PACKAGES = {"tracewire_bus": "bus", "tracewire_engine": "engine_adapter", "tracewire": "sdk"}
CLASS_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8


@dataclass(frozen=True)
class Measured:
    """A class or function with a figure of it."""

    figure: int
    name: str
    excuse: str = ""


def modules() -> dict[str, Path]:
    """The modules of all packages by their dotted names."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _excuse(lines: list[str], node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    above = lines[first - 2].strip() if first > 1 else ""
    return above.removeprefix("# whole:").strip() if above.startswith("# whole:") else ""


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> int:
    given = node.args
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)
    return count - (is_method and not static)


def measure(name: str, path: Path) -> Iterator[tuple[str, Measured]]:
    """Each class, function and parameter list of a module, with its kind."""
    text = path.read_text()
    lines = text.splitlines()

    def walk(node: ast.AST, prefix: str, in_class: bool) -> Iterator[tuple[str, Measured]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                full, is_class = f"{prefix}.{child.name}", isinstance(child, ast.ClassDef)
                excuse, length = _excuse(lines, child), (child.end_lineno or 0) - child.lineno + 1
                yield "class" if is_class else "function", Measured(length, full, excuse)
                if not isinstance(child, ast.ClassDef):
                    yield "parameters", Measured(_parameters(child, in_class), full, excuse)
                yield from walk(child, full, is_class)
            else:
                yield from walk(child, prefix, in_class)

    yield from walk(ast.parse(text), name, False)


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a module imports anywhere."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{module}.{one.name}" for one in node.names} & known.keys()
            found |= inside or {module}
    return {one for one in found & known.keys() if one != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def _only_declares(path: Path) -> bool:
    """Whether a module has nothing to test: constants, structs and protocols, and no function that does anything."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return not any(
        isinstance(function, ast.Lambda)
        or any(not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Constant) for one in function.body)
        for function in functions
    )


def untested(known: dict[str, Path]) -> list[str]:
    """The modules without `tests/unit/<package>/.../test_<module>.py`, but for those that only declare something."""
    found = []
    for name, path in known.items():
        if path.name in ("__init__.py", "__main__.py") or _only_declares(path):
            continue
        *folders, module = name.split(".")
        if not (ROOT / "tests" / "unit").joinpath(*folders, f"test_{module}.py").exists():
            found.append(name)
    return found


def figures() -> dict[str, Any]:
    """All of it."""
    known = modules()
    by_kind: dict[str, list[Measured]] = {"class": [], "function": [], "parameters": []}
    for name, path in known.items():
        for kind, one in measure(name, path):
            by_kind[kind].append(one)
    result: dict[str, Any] = {}
    for kind, most in (("class", CLASS_LINES), ("function", FUNCTION_LINES), ("parameters", PARAMETERS)):
        ranked = sorted(by_kind[kind], key=lambda one: -one.figure)
        result[kind] = {
            "most": most,
            "longest": [ranked[0].figure, ranked[0].name] if ranked else None,
            "over": [[one.figure, one.name] for one in ranked if one.figure > most and not one.excuse],
            "excused": [[one.figure, one.name, one.excuse] for one in ranked if one.figure > most and one.excuse],
        }
    result["circles"] = circles({name: imports(name, path, known) for name, path in known.items()})
    result["untested"] = untested(known)
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in known.values() if path.stem != "__init__")
    result["modules"] = dict(sorted(folders.items()))
    return result


def main() -> int:
    """Print the figures; 1 if one of them is over its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = figures()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for kind in ("class", "function", "parameters"):
            print(f"{kind}: at most {found[kind]['most']}; longest {found[kind]['longest']}")
            for figure, name in found[kind]["over"]:
                print(f"  over: {figure:5} {name}")
            for figure, name, excuse in found[kind]["excused"]:
                print(f"  excused: {figure:5} {name}: {excuse}")
        print(f"circles: {len(found['circles'])}")
        for circle in found["circles"]:
            print("  " + ", ".join(circle))
        print(f"modules without a test at their mirrored path: {len(found['untested'])}")
        for name in found["untested"]:
            print(f"  {name}")
        for folder, count in found["modules"].items():
            print(f"{count:4} {folder}")
    return 1 if found["circles"] or any(found[kind]["over"] for kind in ("class", "function", "parameters")) else 0


if __name__ == "__main__":
    sys.exit(main())
