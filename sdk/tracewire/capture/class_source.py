"""The source text of a class: finds it, cuts it out with its decorators, and lists its free names.

Python keeps the line of a function but not of a class. So `find_class` searches the file of the class's functions, or
of its module, for the qualified name. A class of a notebook without functions is searched in the notebook's cells, the
latest first.
"""

from __future__ import annotations

import ast
import linecache
import re
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from tracewire.errors import BlockError

from .source import FunctionSource, dedent, end_of, is_global, parse_file

__all__ = ["ClassSource", "class_names", "find_class"]

#: Comprehensions run where they stand, although Python compiles them as functions.
_COMPREHENSIONS = frozenset({"listcomp", "setcomp", "dictcomp", "genexpr"})


class ClassSource(FunctionSource, frozen=True, eq=False, dict=True):
    """The syntax tree of a class, and its file."""

    node: ast.ClassDef

    @property
    def first_line(self) -> int:
        """The line of the first decorator, or of the `class` statement."""
        return min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])

    @property
    def travelling(self) -> Sequence[ast.AST]:
        return [self.node]

    def text(self, name: str) -> str:
        """The dedented definition, with decorators, under another name."""
        if (known := self._definitions.get((name, ()))) is None:
            known = self._definitions[name, ()] = self._text(name)
        return known

    def _text(self, name: str) -> str:
        end_line, _ = end_of(self.node)
        lines = [text.encode() for text in self.file.lines[self.first_line - 1 : end_line]]
        source = dedent(lines, self.node.col_offset)
        if name == self.node.name:
            return source
        # Python derives a private name (`__x`) from the class's name without the underscores before it.
        new = "_" * 8 + self.node.name.lstrip("_") if self._has_private_names else name
        renamed = re.sub(rf"^(class[\s\\]+){self.node.name}\b", rf"\g<1>{new}", source, count=1, flags=re.MULTILINE)
        text = f"{renamed.rstrip()}\n{new}.__name__ = {new}.__qualname__ = {self.node.name!r}\n"
        return text if new == name else f"{text}{name} = {new}\n"

    @cached_property
    def _has_private_names(self) -> bool:
        found = re.findall(r"\b__\w+", "\n".join(self.file.lines[self.first_line - 1 : end_of(self.node)[0]]))
        return any(not one.endswith("__") for one in found) and bool(self.node.name.strip("_"))

    def _names(self, *, eager: bool) -> dict[str, int]:
        try:
            text = "from __future__ import annotations\n" + self.text(self.node.name)
            table = symtable.symtable(text, self.filename, "exec")
        except SyntaxError as error:
            raise self._syntax_error(error, self.first_line - 1) from None
        names: set[str] = set()
        _collect(table, names, running=True, eager=eager)
        names.discard(self.node.name)
        lines: dict[str, int] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id in names:
                lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
        return {name: lines.get(name, self.node.lineno) for name in sorted(names)}

    @cached_property
    def eager_names(self) -> dict[str, int]:
        """Names that the class statement reads (bases, decorators, default values), each with its line."""
        return self._names(eager=True)

    @cached_property
    def late_names(self) -> dict[str, int]:
        """Names that the functions of the class read when they run, each with its line."""
        return self._names(eager=False)

    def base(self, name: str, cls: type) -> Any:
        """The base class that the class statement names `name`; None if there is none."""
        bases = getattr(cls, "__orig_bases__", cls.__bases__)
        for expression, base in zip(self.node.bases, bases, strict=False):
            if isinstance(expression, ast.Name) and expression.id == name:
                return base
        return None

    @cached_property
    def checked_class(self) -> bool:
        """True once the class was checked.

        Raises:
            BlockError: the class has a `global` statement, or does not compile by itself.
        """
        self._check_globals()
        self._compile(self.text(self.node.name), self.first_line)
        return True


def _collect(table: symtable.SymbolTable, names: set[str], *, running: bool, eager: bool) -> None:
    """Add to `names` the global names that are read while the class is defined (`eager`), or later."""
    if "annotation" in str(table.get_type()):
        return
    if table.get_type() == "function" and table.get_name() not in _COMPREHENSIONS:
        running = False
    if running == eager:
        for symbol in table.get_symbols():
            known = is_global(symbol) if table.get_type() != "module" else not symbol.is_assigned()
            if symbol.is_referenced() and known:
                names.add(symbol.get_name())
    for child in table.get_children():
        _collect(child, names, running=running, eager=eager)


#: The functions that Python 3.14 makes of a class's annotations. Their first line may be that of a decorator.
_OF_ANNOTATIONS = frozenset({"__annotate__", "__annotate_func__"})

_found: WeakKeyDictionary[type, ClassSource] = WeakKeyDictionary()


def find_class(cls: type) -> ClassSource:
    """The source of a class of the caller.

    Raises:
        BlockError: there is no source, or several class statements may be the class's.
    """
    known = _found.get(cls)
    if known is None:
        known = _found[cls] = _read(cls)
    return known


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions in a class's body, including those inside properties, class methods and other wrappers."""
    for name, value in vars(cls).items():
        if name in _OF_ANNOTATIONS:
            continue
        inner = getattr(value, "__func__", None) or getattr(value, "func", None) or value
        for one in (inner, *(getattr(value, part, None) for part in ("fget", "fset", "fdel"))):
            if isinstance(one, types.FunctionType):
                yield one


def globals_of(cls: type) -> Mapping[str, Any]:
    """The globals of the module that defines a class."""
    module = sys.modules.get(cls.__module__)
    for function in functions_of(cls):
        if function.__module__ == cls.__module__:
            return function.__globals__
    return vars(module) if module is not None else {}


def class_names(cls: type, source: ClassSource, around: Mapping[str, Any], missing: object) -> Callable[[str], Any]:
    """A function from a name in a class's source to its value, or to `missing`.

    It looks names up in the closures of the class's functions, among the class's bases, in `around` (the names around
    a class that a function defines), and in the module. It raises a `ValueError` for a closure's name without a value.
    """
    cells: dict[str, types.CellType] = {}
    for function in functions_of(cls):
        cells.update(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    scope = globals_of(cls)

    def meaning(name: str) -> Any:
        if name in cells:
            return cells[name].cell_contents
        if (base := source.base(name, cls)) is not None:
            return base
        return around[name] if name in around else scope.get(name, missing)

    return meaning


def _read(cls: type) -> ClassSource:
    lines = [
        (function.__code__.co_filename, function.__code__.co_firstlineno)
        for function in functions_of(cls)
        if function.__qualname__ == f"{cls.__qualname__}.{function.__name__}"
    ]
    for filename in _files(cls, [name for name, _ in lines]):
        found = _candidates(cls, filename, [line for name, line in lines if name == filename])
        if len(found) == 1:
            return found[0]
        if found:
            raise BlockError(
                f"the class {cls.__name__} is defined more than once in this file: give each definition a name of its "
                "own",
                filename=filename,
                line=found[0].node.lineno,
            )
    raise BlockError(
        f"the source of the class {cls.__name__} cannot be read, and a class of your own travels as source: "
        "define it with a class statement, in a file or in a notebook's cell",
        filename=_file_of(cls),
    )


def _file_of(cls: type) -> str | None:
    file = globals_of(cls).get("__file__")
    return file if isinstance(file, str) else None


def _files(cls: type, named: Iterable[str]) -> Iterator[str]:
    """The files that may define the class, the most likely first."""
    files = [*named, *filter(None, [_file_of(cls)])]
    if cls.__module__ == "__main__":
        # The cells of a notebook, by the names that IPython gives them.
        files += [
            name for name in reversed(list(linecache.cache)) if "ipykernel" in name or name.startswith("<ipython")
        ]
    yield from dict.fromkeys(files)


def _candidates(cls: type, filename: str, lines: list[int]) -> list[ClassSource]:
    linecache.checkcache(filename)
    text = linecache.getlines(filename, dict(globals_of(cls)))
    if not text:
        return []
    try:
        file = parse_file(filename, "".join(text))
    except SyntaxError:
        return []
    path = cls.__qualname__.replace(".<locals>", "").split(".")
    make = partial(ClassSource, cls.__name__, filename, file=file)
    found = [node for node in _at(file.tree.body, path) if _fits(node, cls, lines)]
    return [make(node=node) for node in found]


def _at(statements: Iterable[ast.AST], path: list[str]) -> Iterator[ast.ClassDef]:
    """The class statements with a qualified name, below some statements."""
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name != path[0]:
                continue
            if len(path) > 1:
                yield from _at(node.body, path[1:])
            elif isinstance(node, ast.ClassDef):
                yield node
        else:
            yield from _at(ast.iter_child_nodes(node), path)


def _fits(node: ast.ClassDef, cls: type, lines: list[int]) -> bool:
    """Whether a class statement may have made `cls`: its lines contain the functions, and it binds the same names."""
    end, _ = end_of(node)
    if not all(node.lineno <= line <= end for line in lines):
        return False
    bound: set[str] = set()
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
            case ast.Assign(targets=targets):
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    private = re.compile(rf"_{cls.__name__.lstrip('_')}__")
    known = {private.sub("__", name, count=1) for name in [*vars(cls), *_annotated(cls)]}
    known |= set(getattr(cls, "__members__", ()))
    return bound - {"_", "_ignore_"} <= known or bool(lines)


def _annotated(cls: type) -> Iterable[str]:
    """The names that a class's own annotations have."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    names: Mapping[str, Any] = vars(cls).get("__annotations__", {})
    return names
