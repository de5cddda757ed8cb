"""A function's own source text: found, cut out, dedented, and the names that it uses but does not bind.

What is cut out is the text as it stands in the file, so that line numbers hold and a comment or a string keeps what it
says; nothing is written anew from a syntax tree. Text that starts a line inside a multi-line string is left as it is,
where `textwrap.dedent` would change the string.
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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tracewire.errors import BlockError

__all__ = ["SOURCES_KEPT", "FunctionSource", "dedent", "end_of", "find", "parse_file"]

_ANNOTATIONS = __future__.annotations.compiler_flag

#: Statements that mean something only inside a function; a block's body runs without one around it.
_REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Return: ("return", "it returns nothing; .save() what it should hand out"),
    ast.Yield: ("yield", "it is no generator; append to a saved list, and what is new in each step is streamed"),
    ast.YieldFrom: (
        "yield from",
        "it is no generator; append to a saved list, and what is new in each step is streamed",
    ),
    ast.Await: ("await", "it runs inside the forward pass, where nothing can be awaited"),
    ast.AsyncFor: ("async for", "it runs inside the forward pass, where nothing can be awaited"),
    ast.AsyncWith: ("async with", "it runs inside the forward pass, where nothing can be awaited"),
    ast.Nonlocal: ("nonlocal", "what it rebinds stays on the engine and never comes back; .save() it instead"),
    ast.Global: ("global", "what it rebinds stays on the engine and never comes back; .save() it instead"),
}

_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class _File:
    """One source file, parsed once."""

    name: str
    lines: tuple[str, ...]
    tree: ast.Module


@lru_cache(maxsize=32)
def parse_file(name: str, text: str) -> _File:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(text, name)
    return _File(name, tuple(_lines(text)), tree)


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: a form feed or a Unicode line separator ends none."""
    return io.StringIO(text).readlines()


def find(function: types.FunctionType) -> FunctionSource:
    """The source of a function or lambda, from its file, its notebook cell or wherever `linecache` has it.

    Raises:
        BlockError: there is none, or it is not the one that the function was compiled from.
    """
    code = function.__code__
    key = (code, code.co_filename)
    if (known := _found.get(key)) is None:
        while len(_found) >= SOURCES_KEPT:
            del _found[next(iter(_found))]
        known = _found[key] = _read(function)
    return known


#: Sources read so far: what was read first is nearest to what was compiled, and reading takes time.
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
        f"{name}() is not at this line any more: the file has changed since it was imported; import it again",
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
    """The lambda that `code` was compiled from; several may stand on one line."""
    spans = [position for position in code.co_positions() if None not in position and position[2] != position[3]]
    found = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and all(_within(position, node.body) for position in spans)
    ]
    # Around a nested lambda stands another; the innermost that holds all of the code is it.
    inner = [node for node in found if not any(other in ast.walk(node.body) for other in found)]
    if len(inner) != 1:
        raise BlockError(
            "the source of this lambda cannot be told from its neighbours on the line: write it as a def",
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
    """Names of all parameters, in the order in which a code object has them."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return tuple(names)


@dataclass(frozen=True)
class Use:
    """One use of a name: `("nn", "functional", "relu")` for `torch.nn.functional.relu`; `()` for the bare name."""

    chain: tuple[str, ...]
    line: int
    #: Whether the last of them is assigned or deleted.
    changed: bool


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function's syntax tree and the file that it stands in. Line numbers count from 1, in that file."""

    name: str
    filename: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.With | ast.ClassDef
    file: _File

    def error(self, message: str, line: int | None = None) -> BlockError:
        """A `BlockError` at `line` of this file."""
        return BlockError(message, filename=self.filename, line=line or self.node.lineno)

    # --- text ---------------------------------------------------------------------------------------------------------

    @cached_property
    def body(self) -> tuple[str, int]:
        """The body alone, dedented, and the line that it starts at. A comment before the first statement is dropped."""
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
        """The whole definition, dedented, under another name, with some expressions of its head replaced.

        A lambda becomes an assignment of it. Decorators are left out.
        """
        key = name, tuple((*end_of(expression), text) for expression, text in replaced.items())
        if (known := self._definitions.get(key)) is None:
            known = self._definitions[key] = self._cut(name, replaced)
        return known

    @cached_property
    def _definitions(self) -> dict[tuple[str, Any], str]:
        """What `definition` returned: a service submits the same functions again and again."""
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
        """Names that the body uses and binds nowhere, each with the line of its first use.

        Names in annotations are not counted: they are not evaluated. Nor are those of default values, which belong to
        the surrounding scope.
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
        # The last one: lambdas in default values come before it.
        _collect(functions[-1], names)
        lines: dict[str, int] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id in names:
                lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
        return {name: lines.get(name, self.node.lineno) for name in sorted(names)}

    @property
    def travelling(self) -> Sequence[ast.AST]:
        """What of the node runs on the engine: the body, without decorators and default values."""
        body = self.node.body
        return body if isinstance(body, list) else [body]

    def uses(self, name: str) -> list[Use]:
        """Where `name` is used in this function, each with the attributes that are reached through it there."""
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
        """What the file's `import` statements bind, by name: the module, and the attribute or None."""
        return _imports(ast.walk(self.file.tree))

    @cached_property
    def module_imports(self) -> dict[str, list[tuple[str, str | None]]]:
        """The same, of statements at the module's own level (`if TYPE_CHECKING:` included) only."""
        return _imports(_own_level(self.file.tree.body))

    def default_names(self) -> dict[str, ast.expr]:
        """Expressions of the default values, by parameter."""
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

    # --- what cannot travel -------------------------------------------------------------------------------------------

    def check_block(self) -> None:
        """Refuse what a block cannot do.

        Raises:
            BlockError: at the first such line.
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
        """Refuses what a function that a block calls cannot do, once.

        Raises:
            BlockError: at the first such line.
        """
        if isinstance(self.node, ast.AsyncFunctionDef):
            raise self.error(f"a block cannot call the coroutine function {self.name}(): nothing can be awaited there")
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
    """All nodes below, without those of nested functions; what such a function evaluates outside itself is included."""
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
    names.update(symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced())
    for child in table.get_children():
        _collect(child, names)


def dedent(lines: list[bytes], column: int) -> str:
    """`lines` less their first `column` bytes of white space, except where a line starts inside a string."""
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
