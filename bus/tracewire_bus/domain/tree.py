"""The module tree of an engine's model, to print and to check a block's paths against before the block runs.

A path names a module under the model, such as `model.layers.2.mlp`; the root's path is `""`. The tree is built from the
engine's entry in the registry and needs no model. Its `repr` is that of nnsight.

`check_block` finds the literal paths in a block's source that lead to no module. The engine checks a computed path when
the block uses it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias, overload

import msgspec

from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.wire.messages import EngineInfo

__all__ = ["ForwardSource", "ModuleNode", "ModuleTree", "PathProblem", "UnknownModule", "check_block", "index_names"]

#: Names that nnsight lets a block read or call on any module, besides the module's own attributes.
MODULE_ATTRIBUTES: Final = frozenset(
    {
        *("input", "inputs", "output", "outputs", "source", "skip", "next", "path", "iter", "all", "edit", "save"),
        *("get", "modules", "named_modules", "parent", "root", "device", "devices", "to", "cpu", "cuda"),
    }
)

#: Blocks whose problems one tree caches.
_CACHED_BLOCKS: Final = 256
#: Characters of source up to which a block's problems, or its index names, are cached or looked for.
_CACHED_SOURCE: Final = 20_000
#: Problems of one block for which a similar path is searched; the search is slow.
_MAX_SUGGESTIONS: Final = 8

#: Names that read or edit a value which needs a tap on an engine with CUDA graphs, and the value in the tap's name.
_TAPPED_VALUES: Final = {"output": "output", "outputs": "output", "input": "input", "inputs": "input", "skip": "skip"}

#: Names that a block can read or call on the model itself.
ROOT_ATTRIBUTES: Final = frozenset({"logits", "samples", "residual", "tokenizer", "config", "generator"})


class UnknownModule(AttributeError, LookupError):
    """The model has no module at a path.

    Attributes:
        path: the path.
        nearest: a similar path that exists; `None` if there is none.
    """

    def __init__(self, path: str, nearest: str | None = None) -> None:
        self.path = path
        self.nearest = nearest
        hint = f"; the nearest that exists is {nearest!r}" if nearest else ""
        super().__init__(f"no module at {path!r}{hint}")


class PathProblem(msgspec.Struct, frozen=True):
    """A path in a block's source that leads to no module, or that the engine does not serve.

    Attributes:
        path: the path.
        line, column: the path's place in the source; lines count from 1, columns from 0.
        nearest: a similar path that exists; `None` if there is none, or it was not searched.
        reason: why the engine does not serve an existing path; `""` if the path does not exist.
    """

    path: str
    line: int
    column: int
    nearest: str | None
    reason: str = ""


class ForwardSource:
    """The source of a module's `forward`, as nnsight prints it: the name of each operation stands beside its line.

    It prints as that text. A block reads and edits the operations: `model.model.layers[0].mlp.source.NAME.output`.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} exists on the engine, inside a block. In this process, print(...) shows the source's operations"
        )

    def __repr__(self) -> str:
        return self.text


class ModuleTree:
    """The modules of an engine's model, by path, in the order in which the model defines them.

    Access children as in a block: `tree.model.layers[2].mlp` is a `ModuleNode`.

    Attributes:
        layers: the path of the list of decoder layers; `""` if unknown.
        layer_count: the number of decoder layers.
        attention: the attention of the decoder layers whose heads the engine knows, by the layer's number.
        taps: the only locations that an engine with CUDA graphs serves; empty if the engine serves all.
        checked_blocks: cache of `check_block`.
        fitting_interventions: cache of `intervention_checks.check_encoded`: digests of interventions that fit.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.layers = info.layers
        self.layer_count = info.layer_count
        self.taps = frozenset(info.taps)
        self.attention = {one.layer: one for one in info.attention}
        # Caches, since services send the same blocks and interventions repeatedly.
        self.checked_blocks: dict[tuple[Any, ...], list[PathProblem]] = {}
        self.fitting_interventions: set[bytes] = set()
        self._classes = {module.path: module.cls for module in info.modules} or {"": "Module"}
        self._attributes = {cls: frozenset(names) for cls, names in info.attributes.items()}
        self._sources = info.sources
        self._children: dict[str, dict[str, str]] = {path: {} for path in self._classes}
        for path in self._classes:
            parent, _, name = path.rpartition(".")
            if path and parent in self._children:
                self._children[parent][name] = path

    @property
    def paths(self) -> list[str]:
        """The paths of all modules, the root's (`""`) first."""
        return list(self._classes)

    def knows(self, path: str) -> bool:
        """Whether there is a module at `path`."""
        return path in self._classes

    def children(self, path: str = "") -> list[str]:
        """Paths of the modules directly under the one at `path`.

        Raises:
            UnknownModule: there is no module at `path`.
        """
        return list(self._children_of(path).values())

    def forward_source(self, path: str) -> ForwardSource | None:
        """The source of the `forward` of the module at `path`; None if the engine does not publish it."""
        text = self._sources.get(self._classes.get(path, ""))
        return None if text is None else ForwardSource(text)

    def cls(self, path: str = "") -> str:
        """Name of the class of the module at `path`.

        Raises:
            UnknownModule: there is no module at `path`.
        """
        self._children_of(path)
        return self._classes[path]

    def child(self, path: str, name: str | int) -> str | None:
        """The path of a child by name or index; None if there is no such child. A negative index counts from the end.

        Raises:
            UnknownModule: there is no module at `path`.
        """
        children = self._children_of(path)
        if isinstance(name, int) and name < 0:
            name += len(children)
        return children.get(str(name))

    def readable(self, path: str, name: str) -> bool:
        """Whether a block can read the attribute `name`, other than a child module, on the module at `path`."""
        return (
            name.startswith("_")
            or name in MODULE_ATTRIBUTES
            or (not path and name in ROOT_ATTRIBUTES)
            or name in self._attributes.get(self._classes[path], ())
        )

    def serves(self, location: str) -> bool:
        """Whether blocks and declared interventions can use a location, such as `model.layers.3.output`."""
        return not self.taps or location in self.taps

    def not_tapped_reason(self, location: str) -> str:
        """The text of the error about a location that the engine does not serve."""
        taps = sorted(self.taps)
        shown = ", ".join(taps[:8]) + (", ..." if len(taps) > 8 else "")
        return f"{location!r} is not a tap of this engine, which replays CUDA graphs and serves only {shown}"

    def _readable_names(self, path: str) -> list[str]:
        return sorted(
            {*MODULE_ATTRIBUTES, *(() if path else ROOT_ATTRIBUTES), *self._attributes.get(self._classes[path], ())}
        )

    def nearest(self, path: str) -> str | None:
        """The existing path that is most similar to `path`, or None if none is similar; `path` itself if it exists.

        The search tries, in this order: a similarly spelled child or attribute at the first step that does not exist;
        the shortest path that ends with `path`; the most similarly spelled path.
        """
        known, rest = self._split(path)
        if not rest:
            return path
        names = self._children[known]
        meant = _similar(rest[0], list(names))
        if meant is not None:
            return self._walk_similar(names[meant], rest[1:])
        if len(rest) == 1:
            word = _similar(rest[0], self._readable_names(known))
            if word is not None:
                return f"{known}.{word}" if known else word
        ends = [other for other in self._classes if other.endswith("." + path)]
        if ends:
            return min(ends, key=len)
        # Layers repeat: compare with one path of each shape, then prefer the layer with the same number.
        shapes: dict[str, str] = {}
        for other in self._classes:
            shapes.setdefault(_shape(other), other)
        from difflib import get_close_matches

        found = get_close_matches(_shape(path), [shape for shape in shapes if shape], n=1, cutoff=0.6)
        if not found:
            return None
        exact = _fill(found[0], re.findall(r"\d+", path))
        return exact if exact in self._classes else shapes[found[0]]

    def _split(self, path: str) -> tuple[str, list[str]]:
        """The longest existing path that `path` begins with, and the steps after it."""
        steps = path.split(".") if path else []
        known = ""
        for count, step in enumerate(steps):
            child = self._children[known].get(step)
            if child is None:
                return known, steps[count:]
            known = child
        return known, []

    def _walk_similar(self, path: str, steps: list[str]) -> str:
        """Follow `steps` from `path` as long as a child has the same or a similar name; returns the last path."""
        for step in steps:
            name = _similar(step, list(self._children[path]))
            if name is None:
                break
            path = self._children[path][name]
        return path

    def _children_of(self, path: str) -> dict[str, str]:
        try:
            return self._children[path]
        except KeyError:
            raise UnknownModule(path, self.nearest(path)) from None

    # --- access by attribute, and printing ----------------------------------------------------------------------------

    @property
    def root(self) -> ModuleNode:
        """The node of the model itself."""
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
        """The tree below `path`, indented. Equal consecutive modules of a list are printed once, with their number.

        Raises:
            UnknownModule: there is no module at `path`.
        """
        lines: list[str] = []
        run: list[str] = []
        previous = ""
        for name, child in self._children_of(path).items():
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
    """One module of a tree. Access its children by attribute, index or path; iterate and take `len` as of a list.

    Attributes:
        path: the module's path.
    """

    __slots__ = ("_tree", "path")

    def __init__(self, tree: ModuleTree, path: str) -> None:
        self._tree = tree
        self.path = path

    @property
    def cls(self) -> str:
        """Name of the module's class."""
        return self._tree.cls(self.path)

    @overload
    def __getitem__(self, key: slice) -> list[ModuleNode]: ...
    @overload
    def __getitem__(self, key: str | int) -> ModuleNode: ...

    def __getitem__(self, key: str | int | slice) -> ModuleNode | list[ModuleNode]:
        """A child by index (negative: from the end), a module by its path from here, or a slice of the children.

        Raises:
            UnknownModule: there is no such module; the error names a similar path.
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._tree.child(self.path, name) is None and self._tree.readable(self.path, name):
            if name == "source" and (source := self._tree.forward_source(self.path)) is not None:
                return source
            raise AttributeError(_only_in_block(".".join(filter(None, (self.path, name))), name, self.path))
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


def _only_in_block(path: str, name: str, parent: str) -> str:
    """The text of the error about an attribute that a block can read, but a `ModuleNode` does not have."""
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
    """The item of `names` that is equal to `name`, the nearest index, or similarly spelled; None if there is none."""
    if name in names:
        return name
    if re.fullmatch(r"-?\d+", name):
        indices = [int(other) for other in names if other.isdecimal()]
        return str(min(indices, key=lambda index: abs(index - int(name)))) if indices else None
    from difflib import get_close_matches

    found = get_close_matches(name, names, n=1, cutoff=0.6)
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
    """The free names of a block's source that it uses as an index, or as the argument of `residual()`.

    Empty for a source that does not parse or is very long.
    """
    if len(source) > _CACHED_SOURCE:
        return frozenset()
    return _index_names(source)


@lru_cache(maxsize=512)
def _index_names(source: str) -> frozenset[str]:
    try:
        module = parse_source(source)
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
    """Find the literal paths in a block's source that lead to no module and no readable attribute.

    A path is a chain of attributes and constant indices from the variable `model_name`. The check of a chain ends at a
    slice, a computed index, a call, or an attribute that is not a module; `model.get("a.path")` and `model.residual(3)`
    are checked, too. The body of a `try` with handlers is not checked, since the block handles an error there, nor a
    function that rebinds `model_name`.

    Args:
        tree: the modules of the model.
        source: the block's source.
        model_name: the block's name for the model.
        indices: values of names from `index_names`, which then count as constant indices.

    Returns:
        the problems in the order of the source; empty for a source that does not parse, or nests too deep.
    """
    if len(source) > _CACHED_SOURCE:
        return _check_block(tree, source, model_name, indices)
    known = tree.checked_blocks.get((source, model_name, indices))
    if known is None:
        if len(tree.checked_blocks) >= _CACHED_BLOCKS:
            tree.checked_blocks.clear()
        known = tree.checked_blocks[source, model_name, indices] = _check_block(tree, source, model_name, indices)
    return known


def _check_block(
    tree: ModuleTree, source: str, model_name: str, indices: tuple[tuple[str, int], ...]
) -> list[PathProblem]:
    try:
        module = parse_source(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    checker = _Checker(tree, model_name, dict(indices))
    try:
        if not any(checker.binds(node) for node in _own_scope(module)):
            checker.visit(module)
    except RecursionError:
        return []
    problems = sorted(checker.problems, key=lambda problem: (problem.line, problem.column))
    # The search for a similar path is slow.
    return [
        problem if problem.reason or problem.nearest or place >= _MAX_SUGGESTIONS else _with_nearest(tree, problem)
        for place, problem in enumerate(problems)
    ]


def _with_nearest(tree: ModuleTree, problem: PathProblem) -> PathProblem:
    return msgspec.structs.replace(problem, nearest=tree.nearest(problem.path))


_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, except those inside functions that are defined there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _Scope):
            yield from _own_scope(child)


class _Checker(ast.NodeVisitor):
    """Collects the problems of each chain that starts at the model's name."""

    def __init__(self, tree: ModuleTree, model_name: str, indices: Mapping[str, int]) -> None:
        self._tree = tree
        self._indices = indices
        self._name = model_name
        self.problems: list[PathProblem] = []

    def binds(self, node: ast.AST) -> bool:
        """Whether `node` binds the model's name."""
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
        """Skip the body if there are handlers."""
        inner: list[ast.stmt | ast.ExceptHandler] = [*node.handlers, *node.orelse, *node.finalbody]
        for statement in inner if node.handlers else [*node.body, *inner]:
            self.visit(statement)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        """Skip the body."""
        for statement in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check the chain that ends with `node`."""
        self._check_chain(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Check the chain that ends with `node`."""
        self._check_chain(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Check the chain that ends with `node`."""
        self._check_chain(node)

    def _check_chain(self, outermost: ast.expr) -> None:
        """Check one chain, and visit the expressions in its indices and arguments."""
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
            self._check_links(links[::-1])
        else:
            self.visit(node)

    def _check_links(self, links: list[ast.expr]) -> None:
        path = ""
        for index, link in enumerate(links):
            following = links[index + 1] if index + 1 < len(links) else None
            match link:
                case ast.Attribute(attr="get") if self._literal(following) is not None:
                    path_or_none = self._walk(path, [(step, link) for step in self._dotted(following)])
                case ast.Attribute(attr="residual") if not path and isinstance(following, ast.Call):
                    self._check_residual(following)
                    return
                case ast.Attribute(attr=word) if word in _TAPPED_VALUES and self._tree.child(path, word) is None:
                    self._check_served(f"{path}.{_TAPPED_VALUES[word]}", link)
                    return
                case ast.Attribute(ctx=ast.Load()):
                    path_or_none = self._walk(path, [(link.attr, link)])
                case ast.Subscript(ctx=ast.Load()) if (key := self._constant(link.slice)) is not None:
                    path_or_none = self._walk(path, [(key, link)])
                case ast.Call(func=ast.Attribute(attr="get")) if self._literal(link) is not None:
                    continue
                case _:
                    return
            if path_or_none is None:
                return
            path = path_or_none

    def _check_served(self, location: str, node: ast.AST) -> None:
        if not self._tree.serves(location):
            line, column = getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0)
            reason = self._tree.not_tapped_reason(location)
            self.problems.append(PathProblem(location, line, column - len(location.rpartition(".")[2]), None, reason))

    def _walk(self, path: str, steps: list[_Step]) -> str | None:
        """The module that `steps` lead to from `path`, or None. Adds a problem if a step is not even readable."""
        for step, node in steps:
            child = self._tree.child(path, step)
            if child is None:
                if isinstance(step, int) or not self._tree.readable(path, step):
                    self._add_problem(".".join(filter(None, (path, str(step)))), node)
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

    def _check_residual(self, call: ast.Call) -> None:
        count = self._tree.layer_count
        if len(call.args) != 1 or call.keywords or not count:
            return
        layer = self._constant(call.args[0])
        if isinstance(layer, int) and not -count <= layer < count:
            nearest = f"residual({count - 1 if layer > 0 else -count})"
            self.problems.append(PathProblem(f"residual({layer})", call.lineno, call.col_offset, nearest))
        elif isinstance(layer, int):
            self._check_served(f"{self._tree.layers}.{layer % count}.output", call)

    def _constant(self, node: ast.expr) -> str | int | None:
        """The value of a constant index (an int, a negated int, a str, or a name in `indices`), or None."""
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

    def _add_problem(self, path: str, node: ast.expr) -> None:
        line, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        if isinstance(node, ast.Attribute):
            column -= len(node.attr.encode())
        elif isinstance(node, ast.Subscript):
            line, column = node.slice.lineno, node.slice.col_offset
        self.problems.append(PathProblem(path, line, column, None))
