"""The module tree that an engine published: to look at, and to check a block's paths against before it runs.

A path names a module under the model, as in `model.layers.2.mlp`; the root's is `""`. The tree is made of what the
registry says of an engine and needs no model. It prints as nnsight's does.

`check_block` finds, in a block's source, the paths written out literally that lead
nowhere. A path that the block computes is for the engine to refuse, when the block asks for it.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias, overload

from tracewire_bus.wire.messages import EngineInfo

__all__ = ["ModuleNode", "ModuleTree", "PathProblem", "UnknownModule", "check_block", "index_names"]

#: What nnsight lets a block read or call on any module, besides the module's own attributes.
MODULE_WORDS: Final = frozenset(
    {
        *("input", "inputs", "output", "outputs", "source", "skip", "next", "path", "iter", "all", "edit", "save"),
        *("get", "modules", "named_modules", "parent", "root", "device", "devices", "to", "cpu", "cuda"),
    }
)

#: How many blocks' problems a tree remembers, and of how many characters at most.
_REMEMBERED: Final = 256
_LONG: Final = 20_000
#: For how many of a block's problems is looked what is near.
_NEAREST: Final = 8

#: Words that read or edit a value which only a tap serves, on an engine with CUDA graphs, and that value's name.
_SERVED: Final = {"output": "output", "outputs": "output", "input": "input", "inputs": "input", "skip": "skip"}

#: What a block can read or call on the model itself.
ROOT_WORDS: Final = frozenset({"logits", "samples", "residual", "tokenizer", "config", "generator"})


class UnknownModule(AttributeError, LookupError):
    """The model has no module at `path`; the nearest that it has is at `nearest`, if anything is near."""

    def __init__(self, path: str, nearest: str | None = None) -> None:
        self.path = path
        self.nearest = nearest
        hint = f"; the nearest that exists is {nearest!r}" if nearest else ""
        super().__init__(f"no module at {path!r}{hint}")


@dataclass(frozen=True, slots=True)
class PathProblem:
    """A path in a block that leads nowhere, where it stands (lines from 1, columns from 0), and what is near."""

    path: str
    line: int
    column: int
    nearest: str | None
    #: Set where the path exists, but the engine does not serve it: why.
    reason: str = ""


class ModuleTree:
    """The modules of an engine's model, by path, in the order in which the model defines them.

    Children are reached as in a block: `tree.model.layers[2].mlp` is a `ModuleNode`.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.layers = info.layers
        self.layer_count = info.layer_count
        #: The only locations that an engine with CUDA graphs serves; empty if it serves all.
        self.taps = frozenset(info.taps)
        #: What `check_block` found in the blocks that it has seen: services send the same ones again and again.
        self.checked: dict[tuple[Any, ...], list[PathProblem]] = {}
        #: Likewise, digests of the interventions that `declared.check_encoded` has found no fault with.
        self.fitting: set[bytes] = set()
        self._classes = {module.path: module.cls for module in info.modules} or {"": "Module"}
        self._attributes = {cls: frozenset(names) for cls, names in info.attributes.items()}
        self._children: dict[str, dict[str, str]] = {path: {} for path in self._classes}
        for path in self._classes:
            parent, _, name = path.rpartition(".")
            if path and parent in self._children:
                self._children[parent][name] = path

    @property
    def paths(self) -> list[str]:
        """Every path, the root's (`""`) first."""
        return list(self._classes)

    def knows(self, path: str) -> bool:
        """Whether there is a module at `path`."""
        return path in self._classes

    def children(self, path: str = "") -> list[str]:
        """Paths of the modules directly under the one at `path`.

        Raises:
            UnknownModule: there is none at `path`.
        """
        return list(self._named(path).values())

    def cls(self, path: str = "") -> str:
        """Name of the class of the module at `path`.

        Raises:
            UnknownModule: there is none.
        """
        self._named(path)
        return self._classes[path]

    def child(self, path: str, name: str | int) -> str | None:
        """Path of a child by name or index, which may count from the end; None if there is no such child."""
        children = self._named(path)
        if isinstance(name, int) and name < 0:
            name += len(children)
        return children.get(str(name))

    def readable(self, path: str, name: str) -> bool:
        """Whether a block can read `name` on the module at `path`, though it is no child module."""
        return (
            name.startswith("_")
            or name in MODULE_WORDS
            or (not path and name in ROOT_WORDS)
            or name in self._attributes.get(self._classes[path], ())
        )

    def serves(self, location: str) -> bool:
        """Whether the engine serves a location, as `model.layers.3.output`, to blocks and declared interventions."""
        return not self.taps or location in self.taps

    def not_tapped(self, location: str) -> str:
        """Why a location is not served."""
        taps = sorted(self.taps)
        shown = ", ".join(taps[:8]) + (", ..." if len(taps) > 8 else "")
        return f"{location!r} is not a tap of this engine, which replays CUDA graphs and serves only {shown}"

    def _words(self, path: str) -> list[str]:
        return sorted({*MODULE_WORDS, *(() if path else ROOT_WORDS), *self._attributes.get(self._classes[path], ())})

    def nearest(self, path: str) -> str | None:
        """The existing path that someone who wrote `path` most likely meant, or None if nothing is near.

        Where `path` goes wrong, a child or a readable name spelled alike; else a path that ends as `path` does; else
        the most similar one.
        """
        known, rest = self._split(path)
        if not rest:
            return path
        names = self._children[known]
        meant = _similar(rest[0], list(names))
        if meant is not None:
            return self._further(names[meant], rest[1:])
        if len(rest) == 1:
            word = _similar(rest[0], self._words(known))
            if word is not None:
                return f"{known}.{word}" if known else word
        ends = [other for other in self._classes if other.endswith("." + path)]
        if ends:
            return min(ends, key=len)
        # Layers repeat: one of each shape is enough to compare with, and then the layer asked for, if it exists.
        shapes: dict[str, str] = {}
        for other in self._classes:
            shapes.setdefault(_shape(other), other)
        found = difflib.get_close_matches(_shape(path), [shape for shape in shapes if shape], n=1, cutoff=0.6)
        if not found:
            return None
        exact = _fill(found[0], re.findall(r"\d+", path))
        return exact if exact in self._classes else shapes[found[0]]

    def _split(self, path: str) -> tuple[str, list[str]]:
        """The longest known path that `path` begins with, and the steps after it."""
        steps = path.split(".") if path else []
        known = ""
        for count, step in enumerate(steps):
            child = self._children[known].get(step)
            if child is None:
                return known, steps[count:]
            known = child
        return known, []

    def _further(self, path: str, steps: list[str]) -> str:
        """As far from `path` along `steps` as there are modules, taking similar names for the same."""
        for step in steps:
            name = _similar(step, list(self._children[path]))
            if name is None:
                break
            path = self._children[path][name]
        return path

    def _named(self, path: str) -> dict[str, str]:
        try:
            return self._children[path]
        except KeyError:
            raise UnknownModule(path, self.nearest(path)) from None

    # --- to look at ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> ModuleNode:
        """The model itself."""
        return ModuleNode(self, "")

    def __getitem__(self, key: str | int) -> ModuleNode:
        return self.root[key]

    def __getattr__(self, name: str) -> ModuleNode:
        if name.startswith("_"):
            raise AttributeError(name)
        node: ModuleNode = getattr(self.root, name)
        return node

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._children[""]]

    def __len__(self) -> int:
        return len(self._classes)

    def __repr__(self) -> str:
        return self.text("")

    def text(self, path: str = "") -> str:
        """The tree below `path`, indented; modules that repeat are printed once."""
        lines: list[str] = []
        run: list[str] = []
        previous = ""
        for name, child in self._named(path).items():
            body = self.text(child)
            if run and not (name.isdecimal() and run[-1].isdecimal() and body == previous):
                lines.append(_repeated(run, previous))
                run = []
            run.append(name)
            previous = body
        if run:
            lines.append(_repeated(run, previous))
        if not lines:
            return f"{self._classes[path]}()"
        inner = "\n".join(lines).replace("\n", "\n  ")
        return f"{self._classes[path]}(\n  {inner}\n)"


class ModuleNode:
    """One module of a tree, with its `path` and the name of its class. Children by attribute or index."""

    __slots__ = ("_tree", "path")

    def __init__(self, tree: ModuleTree, path: str) -> None:
        self._tree = tree
        self.path = path

    @property
    def cls(self) -> str:
        """Name of its class."""
        return self._tree.cls(self.path)

    @overload
    def __getitem__(self, key: slice) -> list[ModuleNode]: ...
    @overload
    def __getitem__(self, key: str | int) -> ModuleNode: ...

    def __getitem__(self, key: str | int | slice) -> ModuleNode | list[ModuleNode]:
        """A child by index (from the end if negative) or by path from here; with a slice, a list of children.

        Raises:
            UnknownModule: there is none. It names the nearest path that exists.
        """
        if isinstance(key, slice):
            return list(self)[key]
        child = self._tree.child(self.path, key)
        if child is None:
            wanted = ".".join(filter(None, (self.path, str(key))))
            if not self._tree.knows(wanted):
                raise UnknownModule(wanted, self._tree.nearest(wanted))
            child = wanted
        return ModuleNode(self._tree, child)

    def __getattr__(self, name: str) -> ModuleNode:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._tree.child(self.path, name) is None and self._tree.readable(self.path, name):
            raise AttributeError(_in_a_block(".".join(filter(None, (self.path, name))), name, self.path))
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(path.rpartition(".")[2] for path in self._tree.children(self.path))]

    def __len__(self) -> int:
        return len(self._tree.children(self.path))

    def __iter__(self) -> Iterator[ModuleNode]:
        return (ModuleNode(self._tree, path) for path in self._tree.children(self.path))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleNode):
            return NotImplemented
        return self._tree is other._tree and self.path == other.path

    def __hash__(self) -> int:
        return hash((id(self._tree), self.path))

    def __repr__(self) -> str:
        return self._tree.text(self.path)


def _in_a_block(path: str, name: str, parent: str) -> str:
    """Why a name that a block can read cannot be read here."""
    if not parent and name == "edit":
        return (
            "'edit' is nnsight's word: await client.edits(model).install(name, block) installs a standing intervention"
        )
    hint = ""
    if not parent and name in ("tokenizer", "config"):
        hint = f"; transformers' Auto{name.capitalize()}.from_pretrained() gives it here"
    if name == "source":
        written = re.sub(r"\.(\d+)", r"[\1]", path)
        hint = f". To read it, save it in a block: text = tracewire.save(str(model.{written}))"
    return f"{path!r} exists on the engine, inside a block, and not in this process{hint}"


def _repeated(names: list[str], body: str) -> str:
    if len(names) == 1:
        return f"({names[0]}): {body}"
    return f"({names[0]}-{names[-1]}): {len(names)} x {body}"


def _similar(name: str, names: list[str]) -> str | None:
    """One of `names` that `name` may stand for: itself, the nearest index, or one spelled alike."""
    if name in names:
        return name
    if re.fullmatch(r"-?\d+", name):
        indices = [int(other) for other in names if other.isdecimal()]
        return str(min(indices, key=lambda index: abs(index - int(name)))) if indices else None
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def _shape(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _fill(shape: str, numbers: list[str]) -> str:
    parts = shape.split("#")
    if len(parts) - 1 != len(numbers):
        return shape
    return "".join(part for pair in zip(parts, [*numbers, ""], strict=True) for part in pair)


# --- a block's source -------------------------------------------------------------------------------------------------

_Step: TypeAlias = tuple[str | int, ast.expr]


def index_names(source: str) -> frozenset[str]:
    """The names that a block's source uses as an index or a layer, and binds nowhere itself."""
    if len(source) > _LONG:
        return frozenset()
    return _index_names(source)


@lru_cache(maxsize=512)
def _index_names(source: str) -> frozenset[str]:
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.Subscript(slice=index) | ast.Call(func=ast.Attribute(attr="residual"), args=[index]):
                index = index.operand if isinstance(index, ast.UnaryOp) else index
                if isinstance(index, ast.Name):
                    used.add(index.id)
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
    return frozenset(used - bound)


def check_block(
    tree: ModuleTree, source: str, model_name: str, indices: tuple[tuple[str, int], ...] = ()
) -> list[PathProblem]:
    """Every literal path in `source` from the variable `model_name` that leads to no module and no readable name.

    A chain of attributes and constant indices is followed as long as it goes through modules; a slice, a computed
    index, a call or an attribute that is no module ends the check of that chain, and `model.get("a.path")` and
    `model.residual(3)` are checked too. What stands in a `try` with handlers is not: there, a block may be finding
    out. Nor is anything where `model_name` is bound anew. `indices` are values of `index_names`, which are followed as
    constants are. A source that does not parse, or nests
    too deep to be walked, has no problems here.
    """
    if len(source) > _LONG:
        return _check_block(tree, source, model_name, indices)
    known = tree.checked.get((source, model_name, indices))
    if known is None:
        if len(tree.checked) >= _REMEMBERED:
            tree.checked.clear()
        known = tree.checked[source, model_name, indices] = _check_block(tree, source, model_name, indices)
    return known


def _check_block(
    tree: ModuleTree, source: str, model_name: str, indices: tuple[tuple[str, int], ...]
) -> list[PathProblem]:
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    checker = _Checker(tree, model_name, dict(indices))
    try:
        if not any(checker.binds(node) for node in _own_scope(module)):
            checker.visit(module)
    except RecursionError:
        return []
    problems = sorted(checker.problems, key=lambda problem: (problem.line, problem.column))
    # Looking for what is near takes long beside finding a problem.
    return [
        problem if problem.reason or problem.nearest or place >= _NEAREST else _with_nearest(tree, problem)
        for place, problem in enumerate(problems)
    ]


def _with_nearest(tree: ModuleTree, problem: PathProblem) -> PathProblem:
    return replace(problem, nearest=tree.nearest(problem.path))


_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` but those inside of functions defined there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _Scope):
            yield from _own_scope(child)


class _Checker(ast.NodeVisitor):
    """Follows each chain from the model's name."""

    def __init__(self, tree: ModuleTree, model_name: str, indices: Mapping[str, int]) -> None:
        self._tree = tree
        self._indices = indices
        self._name = model_name
        self.problems: list[PathProblem] = []

    def binds(self, node: ast.AST) -> bool:
        """Whether `node` gives the model's name another meaning."""
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                return name == self._name
            case ast.arg(arg=name):
                return name == self._name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                return name == self._name
            case ast.alias(name=name, asname=other):
                return (other or name.partition(".")[0]) == self._name
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                return name == self._name
            case ast.MatchMapping(rest=name):
                return name == self._name
        return False

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        if not any(self.binds(inner) for inner in _own_scope(node)):
            self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Try(self, node: ast.Try) -> None:
        """Skip what a handler may be waiting for."""
        inner: list[ast.stmt | ast.ExceptHandler] = [*node.handlers, *node.orelse, *node.finalbody]
        for statement in inner if node.handlers else [*node.body, *inner]:
            self.visit(statement)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        """Likewise."""
        for statement in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A chain's outermost step."""
        self._chain(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """A chain's outermost step."""
        self._chain(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Perhaps a chain's outermost step."""
        self._chain(node)

    def _chain(self, outermost: ast.expr) -> None:
        """Check one chain, and visit what stands in its indices and arguments."""
        links: list[ast.expr] = []
        node = outermost
        while True:
            if isinstance(node, ast.Attribute):
                links.append(node)
                node = node.value
            elif isinstance(node, ast.Subscript):
                links.append(node)
                self.visit(node.slice)
                node = node.value
            elif isinstance(node, ast.Call):
                links.append(node)
                for argument in [*node.args, *node.keywords]:
                    self.visit(argument)
                node = node.func
            else:
                break
        if isinstance(node, ast.Name) and node.id == self._name:
            self._follow(links[::-1])
        else:
            self.visit(node)

    def _follow(self, links: list[ast.expr]) -> None:
        path = ""
        for index, link in enumerate(links):
            following = links[index + 1] if index + 1 < len(links) else None
            match link:
                case ast.Attribute(attr="get") if self._literal(following) is not None:
                    path_or_none = self._through(path, [(step, link) for step in self._dotted(following)])
                case ast.Attribute(attr="residual") if not path and isinstance(following, ast.Call):
                    self._residual(following)
                    return
                case ast.Attribute(attr=word) if word in _SERVED and self._tree.child(path, word) is None:
                    self._served(f"{path}.{_SERVED[word]}", link)
                    return
                case ast.Attribute(ctx=ast.Load()):
                    path_or_none = self._through(path, [(link.attr, link)])
                case ast.Subscript(ctx=ast.Load()) if (key := self._constant(link.slice)) is not None:
                    path_or_none = self._through(path, [(key, link)])
                case ast.Call(func=ast.Attribute(attr="get")) if self._literal(link) is not None:
                    continue
                case _:
                    return
            if path_or_none is None:
                return
            path = path_or_none

    def _served(self, location: str, node: ast.AST) -> None:
        if not self._tree.serves(location):
            line, column = getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0)
            reason = self._tree.not_tapped(location)
            self.problems.append(PathProblem(location, line, column - len(location.rpartition(".")[2]), None, reason))

    def _through(self, path: str, steps: list[_Step]) -> str | None:
        """The module that `steps` lead to from `path`; None, and perhaps a problem, if they do not end at a module."""
        for step, node in steps:
            child = self._tree.child(path, step)
            if child is None:
                if isinstance(step, int) or not self._tree.readable(path, step):
                    self._problem(".".join(filter(None, (path, str(step)))), node)
                return None
            path = child
        return path

    def _literal(self, call: ast.expr | None) -> str | None:
        match call:
            case ast.Call(args=[ast.Constant(value=str(text))], keywords=[]):
                return text
        return None

    def _dotted(self, call: ast.expr | None) -> list[str]:
        return [step for step in (self._literal(call) or "").split(".") if step]

    def _residual(self, call: ast.Call) -> None:
        count = self._tree.layer_count
        if len(call.args) != 1 or call.keywords or not count:
            return
        layer = self._constant(call.args[0])
        if isinstance(layer, int) and not -count <= layer < count:
            nearest = f"residual({count - 1 if layer > 0 else -count})"
            self.problems.append(PathProblem(f"residual({layer})", call.lineno, call.col_offset, nearest))
        elif isinstance(layer, int):
            self._served(f"{self._tree.layers}.{layer % count}.output", call)

    def _constant(self, node: ast.expr) -> str | int | None:
        """A constant index: an int, its negative, or a str."""
        match node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | str() as value):
                return value
            case ast.Name(id=name):
                return self._indices.get(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                index = self._constant(operand)
                return -index if isinstance(index, int) else None
        return None

    def _problem(self, path: str, node: ast.expr) -> None:
        line, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        if isinstance(node, ast.Attribute):
            column -= len(node.attr.encode())
        elif isinstance(node, ast.Subscript):
            line, column = node.slice.lineno, node.slice.col_offset
        self.problems.append(PathProblem(path, line, column, None))
