"""The source text of a function: finds it, cuts it out, dedents it, and lists its free names.

The text is cut out of the file unchanged and never generated from a syntax tree, so that line numbers stay valid and
comments and strings stay as they are. Lines inside a multi-line string keep their indentation, which `textwrap.dedent`
would change.
"""

from __future__ import annotations
import __future__

import ast
import io
import linecache
import re
import symtable
import tokenize
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from tracewire.errors import BlockError
from tracewire_bus.domain.python_source import parse_source

__all__ = ["SOURCES_KEPT", "FunctionSource", "dedent", "end_of", "find", "is_global", "parse_file"]

_ANNOTATIONS = __future__.annotations.compiler_flag

#: Statements that are valid only inside a function, with the reason for the error: a block's body runs outside one.
_REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Return: ("return", "it has no caller; .save() its outputs"),
    ast.Yield: ("yield", "it is not a generator; append to a saved list, of which each step streams the new items"),
    ast.YieldFrom: (
        "yield from",
        "it is not a generator; append to a saved list, of which each step streams the new items",
    ),
    ast.Await: ("await", "it runs inside the forward pass, where nothing can be awaited"),
    ast.AsyncFor: ("async for", "it runs inside the forward pass, where nothing can be awaited"),
    ast.AsyncWith: ("async with", "it runs inside the forward pass, where nothing can be awaited"),
    ast.Nonlocal: ("nonlocal", "the name is rebound on the engine only; .save() the value instead"),
    ast.Global: ("global", "the name is rebound on the engine only; .save() the value instead"),
}

_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class _File(msgspec.Struct, frozen=True):
    """A parsed source file."""

    name: str
    lines: tuple[str, ...]
    tree: ast.Module


@lru_cache(maxsize=32)
def parse_file(name: str, text: str) -> _File:
    """Parse a source file, once for each text.

    Raises:
        SyntaxError: `text` is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = parse_source(text, name)
    return _File(name, tuple(_lines(text)), tree)


def _lines(text: str) -> list[str]:
    """The lines of a text as Python counts them: form feeds and Unicode line separators do not end a line."""
    return io.StringIO(text).readlines()


def find(function: types.FunctionType) -> FunctionSource:
    """The source of a function or lambda, from its file, its notebook cell or any other entry of `linecache`.

    Raises:
        BlockError: there is no source, or the file has changed since the function was compiled.
    """
    code = function.__code__
    key = (code, code.co_filename)
    if (known := _found.get(key)) is None:
        while len(_found) >= SOURCES_KEPT:
            del _found[next(iter(_found))]
        known = _found[key] = _read(function)
    return known


#: Sources by code object. The first text that was read is the likeliest to be the one that was compiled.
_found: dict[tuple[types.CodeType, str], FunctionSource] = {}
SOURCES_KEPT = 512


def _read(function: types.FunctionType) -> FunctionSource:
    code = function.__code__
    name, filename, line = function.__name__, code.co_filename, code.co_firstlineno
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, function.__globals__)
    if not lines:
        raise BlockError(
            f"the source of {name}() cannot be read, and a block travels as source: "
            "define it in a file or in a notebook's cell",
            filename=filename,
            line=line,
        )
    changed = BlockError(
        f"{name}() is not at this line: the file has changed since it was imported; import it again",
        filename=filename,
        line=line,
    )
    try:
        file = parse_file(filename, "".join(lines))
    except SyntaxError as error:
        raise changed from error
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    if code.co_name == "<lambda>":
        node = _find_lambda(file, code, name)
    else:
        found = [
            node
            for node in ast.walk(file.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == code.co_name
            and min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) == line
        ]
        if not found:
            raise changed
        node = found[0]
    if _parameter_names(node.args) != code.co_varnames[: len(_parameter_names(node.args))]:
        raise changed
    return FunctionSource(name=name, filename=filename, node=node, file=file)


def _find_lambda(file: _File, code: types.CodeType, name: str) -> ast.Lambda:
    """The lambda that `code` was compiled from, among those on its line.

    Raises:
        BlockError: there is none, or several may be it.
    """
    spans = [position for position in code.co_positions() if None not in position and position[2] != position[3]]
    found = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and all(_within(position, node.body) for position in spans)
    ]
    # Of nested lambdas, the innermost one that contains all of the code.
    inner = [node for node in found if not any(other in ast.walk(node.body) for other in found)]
    if len(inner) != 1:
        raise BlockError(
            "this line has several lambdas that may be this one: write it as a def",
            filename=file.name,
            line=code.co_firstlineno,
        )
    return inner[0]


def _within(position: tuple[int | None, ...], node: ast.expr) -> bool:
    line, end_line, column, end_column = position
    if line is None or end_line is None or column is None or end_column is None:
        return False
    return (node.lineno, node.col_offset) <= (line, column) and (end_line, end_column) <= end_of(node)


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Line and column after a node's last character. The parser sets them on every node."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _parameter_names(arguments: ast.arguments) -> tuple[str, ...]:
    """Names of all parameters, in the order of `co_varnames`."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return tuple(names)


class Use(msgspec.Struct, frozen=True):
    """One use of a name.

    Attributes:
        chain: the attributes behind the name: `("nn", "functional", "relu")` for `torch.nn.functional.relu`, and `()`
            for the bare name.
        line: the line of the use.
        changed: whether the source assigns or deletes the name or the last attribute.
    """

    chain: tuple[str, ...]
    line: int
    changed: bool


class FunctionSource(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The syntax tree of a function, and its file. Line numbers are those of the file, from 1."""

    name: str
    filename: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.With | ast.ClassDef
    file: _File

    def error(self, message: str, line: int | None = None) -> BlockError:
        """A `BlockError` at `line` of this file; by default, at the function's first line."""
        return BlockError(message, filename=self.filename, line=line or self.node.lineno)

    # --- text ---------------------------------------------------------------------------------------------------------

    @cached_property
    def body(self) -> tuple[str, int]:
        """The dedented body, and its first line. Comments before the first statement are left out."""
        assert isinstance(self.node, ast.FunctionDef | ast.With)
        first = self.node.body[0]
        line, column = first.lineno, first.col_offset
        if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and first.decorator_list:
            line = min(decorator.lineno for decorator in first.decorator_list)
        lines = [text.encode() for text in self.file.lines[line - 1 : self.node.end_lineno]]
        if lines[0][:column].strip():  # on the line of the def itself
            lines[0] = lines[0][column:]
            column = 0
        return dedent(lines, column), line

    def definition(self, name: str, replaced: dict[ast.expr, str]) -> str:
        """The dedented definition under another name, without decorators. A lambda becomes an assignment.

        `replaced` has the expressions of default values to replace, each with the new text.
        """
        key = name, tuple((*end_of(expression), text) for expression, text in replaced.items())
        if (known := self._definitions.get(key)) is None:
            known = self._definitions[key] = self._cut(name, replaced)
        return known

    @cached_property
    def _definitions(self) -> dict[tuple[str, Any], str]:
        """Cache of `definition`, since services submit the same functions many times."""
        return {}

    def _cut(self, name: str, replaced: dict[ast.expr, str]) -> str:
        node = self.node
        assert not isinstance(node, ast.With)
        end_line, end_column = end_of(node)
        lines = [text.encode() for text in self.file.lines[node.lineno - 1 : end_line]]
        if isinstance(node, ast.Lambda):
            lines[-1] = lines[-1][:end_column]
        for expression, text in sorted(replaced.items(), key=lambda item: (-item[0].lineno, -item[0].col_offset)):
            end_line, end_column = end_of(expression)
            first, last = expression.lineno - node.lineno, end_line - node.lineno
            tail = lines[last][end_column:]
            head = lines[first][: expression.col_offset] + text.encode()
            if first == last:
                lines[first] = head + tail
            else:  # inside parentheses: keep the number of lines
                lines[first] = head + b"\n"
                lines[first + 1 : last] = [b"\n"] * (last - first - 1)
                lines[last] = tail
        if isinstance(node, ast.Lambda):
            lines[0] = lines[0][node.col_offset :]
            return f"{name} = ({b''.join(lines).decode()})"
        source = dedent(lines, node.col_offset)
        if name != node.name:
            source = re.sub(rf"(def[\s\\]+){node.name}\b", lambda match: match[1] + name, source, count=1)
        return source

    # --- names --------------------------------------------------------------------------------------------------------

    @cached_property
    def free_names(self) -> dict[str, int]:
        """The names that the body reads and does not bind, each with the line of its first use.

        Names in annotations and in default values are left out: annotations are not evaluated on the engine, and
        default values belong to the surrounding scope.

        Raises:
            BlockError: the source does not compile by itself.
        """
        text = self.definition(getattr(self.node, "name", "_"), {})
        try:
            table = symtable.symtable("from __future__ import annotations\n" + text, self.filename, "exec")
        except SyntaxError as error:
            raise self._syntax_error(error, self.node.lineno - 1) from None
        functions = [child for child in table.get_children() if child.get_type() == "function"]
        if isinstance(self.node, ast.Lambda):
            functions = [child for child in functions if child.get_name() == "lambda"]
        names: set[str] = set()
        # The last function: lambdas in default values come before it.
        _collect(functions[-1], names)
        lines: dict[str, int] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id in names:
                lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
        return {name: lines.get(name, self.node.lineno) for name in sorted(names)}

    @property
    def travelling(self) -> Sequence[ast.AST]:
        """The nodes that run on the engine: the body, without decorators and default values."""
        body = self.node.body
        return body if isinstance(body, list) else [body]

    def uses(self, name: str) -> list[Use]:
        """The uses of `name` in this function, sorted by line."""
        found: list[Use] = []
        waiting: list[ast.AST] = list(self.travelling)
        while waiting:
            node = waiting.pop()
            chain: list[str] = []
            root, changed = node, isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            while isinstance(root, ast.Attribute):
                chain.insert(0, root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id == name:
                found.append(Use(tuple(chain), root.lineno, changed))
            else:
                waiting += ast.iter_child_nodes(node)
        return sorted(found, key=lambda use: use.line)

    @cached_property
    def imports(self) -> dict[str, list[tuple[str, str | None]]]:
        """For each name that an `import` statement of the file binds: module and attribute, or module and None."""
        return _imports(ast.walk(self.file.tree))

    @cached_property
    def module_imports(self) -> dict[str, list[tuple[str, str | None]]]:
        """The same for the statements at module level only, including those under `if TYPE_CHECKING:`."""
        return _imports(_own_level(self.file.tree.body))

    def default_names(self) -> dict[str, ast.expr]:
        """The expressions of the default values, by parameter."""
        assert not isinstance(self.node, ast.With | ast.ClassDef)
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        found: dict[str, ast.expr] = {}
        if arguments.defaults:
            for argument, default in zip(positional[-len(arguments.defaults) :], arguments.defaults, strict=True):
                found[argument.arg] = default
        for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if keyword_default is not None:
                found[argument.arg] = keyword_default
        return found

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_block(self) -> None:
        """Check that the body has no statement that a block cannot have, and compiles by itself.

        Raises:
            BlockError: it does not; the error names the line of the first problem.
        """
        assert isinstance(self.node, ast.FunctionDef | ast.With)
        refused = [node for node in _own_level(self.node.body) if type(node) in _REFUSED]
        refused += [
            node for node in _own_level(self.node.body) if isinstance(node, ast.comprehension) and node.is_async
        ]
        if refused:
            first = min(refused, key=_line)
            raise self._refusal(type(first), _line(first))
        self._check_globals()
        source, line = self.body
        self._compile(source, line)

    @cached_property
    def checked_helper(self) -> bool:
        """True once this function, which a block calls, was checked.

        Raises:
            BlockError: it is a coroutine function, has a `global` statement, or does not compile by itself.
        """
        if isinstance(self.node, ast.AsyncFunctionDef):
            raise self.error(f"a block cannot call the coroutine function {self.name}(): a block cannot await")
        self._check_globals()
        self._compile(self.definition(getattr(self.node, "name", "_"), {}), self.node.lineno)
        return True

    def _check_globals(self) -> None:
        for node in ast.walk(self.node):
            if isinstance(node, ast.Global):
                raise self._refusal(ast.Global, node.lineno)

    def _refusal(self, kind: type[ast.AST], line: int) -> BlockError:
        statement, reason = _REFUSED.get(kind, _REFUSED[ast.AsyncFor])
        return self.error(f"a block cannot use {statement!r}: {reason}", line)

    def _compile(self, source: str, line: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                compile("\n" * (line - 1) + source, self.filename, "exec", flags=_ANNOTATIONS, dont_inherit=True)
        except SyntaxError as error:
            raise self._syntax_error(error, 0) from None

    def _syntax_error(self, error: SyntaxError, offset: int) -> BlockError:
        line = (error.lineno or 1) + offset
        if "nonlocal" in str(error.msg):
            return self.error(f"a block cannot rebind its own names from a nested function ({error.msg})", line)
        return self.error(f"the source does not compile by itself: {error.msg}", line)


def _line(node: ast.AST) -> int:
    if isinstance(node, ast.comprehension):
        return node.target.lineno
    line = getattr(node, "lineno", 0)
    assert isinstance(line, int)
    return line


def _own_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes below, without the bodies of nested functions, but with their decorators and default values."""
    for node in nodes:
        yield node
        if isinstance(node, _Scope):
            outside: list[ast.AST] = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
            if not isinstance(node, ast.Lambda):
                outside += node.decorator_list
            yield from _own_level(outside)
        else:
            yield from _own_level(ast.iter_child_nodes(node))


def _imports(nodes: Iterable[ast.AST]) -> dict[str, list[tuple[str, str | None]]]:
    found: dict[str, list[tuple[str, str | None]]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found.setdefault(name, []).append((alias.name if alias.asname else name, None))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((node.module, alias.name))
    return found


def _collect(table: symtable.SymbolTable, names: set[str]) -> None:
    if "annotation" in str(table.get_type()):
        return
    names.update(symbol.get_name() for symbol in table.get_symbols() if is_global(symbol) and symbol.is_referenced())
    for child in table.get_children():
        _collect(child, names)


def is_global(symbol: symtable.Symbol) -> bool:
    """Whether a name of a function is one of its module. `Symbol.is_global` says so of all names that a `top` binds."""
    bound = symbol.is_assigned() or symbol.is_parameter() or symbol.is_imported()
    return symbol.is_global() and (symbol.is_declared_global() or not bound)


def dedent(lines: list[bytes], column: int) -> str:
    """Join `lines` without their first `column` bytes of white space, except for lines that start inside a string."""
    text = b"".join(lines).decode()
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif kind.endswith("STRING_START"):
            starts.append(token.start[0])
        elif kind.endswith("STRING_END"):
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
    kept = []
    for number, line in enumerate(_lines(text), 1):
        if number not in inside:
            stripped = line.lstrip(" \t")
            line = line[min(column, len(line) - len(stripped)) :]
        kept.append(line)
    return "".join(kept)
