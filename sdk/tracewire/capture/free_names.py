"""Free names of a piece of code: the names that it reads before it has bound them.

Python's symbol table has the free names of a function. The body of a `with` statement is not a function: it may read a
name before it binds the name, as in `count = count + 1`, and the value then comes from around the body. So `FreeNames`
follows the statements in the order in which they run, with the names that are certainly bound at each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

__all__ = ["FreeNames"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class FreeNames:
    """The free names of `statements`.

    Attributes:
        required: names that the statements read and never bind, each with the line of its first use.
        possible: names that the statements bind, but perhaps only after a use or in one branch, each with that line.
    """

    def __init__(self, statements: Iterable[ast.stmt]) -> None:
        self._free: dict[str, int] = {}
        self._stored: set[str] = set()
        self._flow(statements, set())
        self.required = {name: line for name, line in self._free.items() if name not in self._stored}
        self.possible = {name: line for name, line in self._free.items() if name in self._stored}

    def _flow(self, statements: Iterable[ast.stmt], bound: set[str]) -> set[str]:
        """Follow statements. `bound` has the names that are bound before them; those bound after them are added."""
        for statement in statements:
            self._statement(statement, bound)
        return bound

    def _statement(self, node: ast.stmt, bound: set[str]) -> None:
        match node:
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                self._assignment(node, bound)
            case ast.For() | ast.AsyncFor():
                self._expression(node.iter, bound)
                inner = set(bound)
                self._expression(node.target, inner)
                self._flow(node.body, inner)
                self._flow(node.orelse, set(bound))
            case ast.While(test=test, body=body, orelse=orelse):
                self._expression(test, bound)
                self._flow(body, set(bound))
                self._flow(orelse, set(bound))
            case ast.If(test=test, body=body, orelse=orelse):
                self._expression(test, bound)
                bound |= self._flow(body, set(bound)) & self._flow(orelse, set(bound))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, bound)
                    if item.optional_vars is not None:
                        self._expression(item.optional_vars, bound)
                self._flow(node.body, bound)
            case ast.Try() | ast.TryStar():
                self._try(node, bound)
            case ast.Match(subject=subject, cases=cases):
                self._expression(subject, bound)
                for case in cases:
                    inner = set(bound)
                    self._pattern(case.pattern, inner)
                    if case.guard is not None:
                        self._expression(case.guard, inner)
                    self._flow(case.body, inner)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in node.decorator_list:
                    self._expression(decorator, bound)
                self._store(node.name, bound)
                self._function(node, bound)
            case ast.ClassDef():
                for expression in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
                    self._expression(expression, bound)
                for name, line in FreeNames(node.body)._free.items():
                    self._load(name, line, bound)
                self._store(node.name, bound)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    self._store(alias.asname or alias.name.partition(".")[0], bound)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._expression(child, bound)

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, bound: set[str]) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._expression(value, bound)
                for target in targets:
                    self._expression(target, bound)
            case ast.AugAssign(target=target, value=value):
                if isinstance(target, ast.Name):
                    self._load(target.id, target.lineno, bound)
                self._expression(value, bound)
                self._expression(target, bound)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._expression(value, bound)
                    self._expression(target, bound)
                elif not isinstance(target, ast.Name):
                    self._expression(target, bound)

    def _try(self, node: ast.Try | ast.TryStar, bound: set[str]) -> None:
        after = self._flow(node.orelse, self._flow(node.body, set(bound)))
        for handler in node.handlers:
            if handler.type is not None:
                self._expression(handler.type, bound)
            inner = set(bound)
            if handler.name is not None:
                self._store(handler.name, inner)
            after &= self._flow(handler.body, inner)
        self._flow(node.finalbody, set(bound))
        bound |= after

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                self._store(name, bound)
            case ast.Name(id=name):
                self._load(name, node.lineno, bound)
                if isinstance(node.ctx, ast.Del):
                    bound.discard(name)
            case ast.NamedExpr(target=target, value=value):
                self._expression(value, bound)
                self._expression(target, bound)
            case ast.Lambda():
                self._function(node, bound)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._comprehension(node, bound)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._expression(child, bound)

    def _comprehension(self, node: _Comprehension, bound: set[str]) -> None:
        inner = set(bound)
        own: set[str] = set()
        for generator in node.generators:
            self._expression(generator.iter, inner)
            targets = {name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name)}
            own |= targets
            inner |= targets
            for condition in generator.ifs:
                self._expression(condition, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._expression(part, inner)
        # `:=` in a comprehension binds a name around it.
        bound |= inner - own

    def _function(self, node: _Function, bound: set[str]) -> None:
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self._expression(default, bound)
        own = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        own |= {argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None}
        body: list[ast.stmt] = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        inner = FreeNames(body)
        # Python decides for the whole function whether a name is local.
        for name, line in inner.required.items():
            if name not in own:
                self._load(name, line, bound)

    def _pattern(self, node: ast.AST, bound: set[str]) -> None:
        for inner in ast.walk(node):
            match inner:
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    self._store(name, bound)
                case ast.MatchValue(value=expression) | ast.MatchClass(cls=expression):
                    self._expression(expression, bound)
                case ast.MatchMapping(keys=keys, rest=rest):
                    for key in keys:
                        self._expression(key, bound)
                    if rest is not None:
                        self._store(rest, bound)

    def _load(self, name: str, line: int, bound: set[str]) -> None:
        if name not in bound:
            self._free[name] = min(line, self._free.get(name, line))

    def _store(self, name: str, bound: set[str]) -> None:
        self._stored.add(name)
        bound.add(name)
