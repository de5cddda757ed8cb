"""Finds what the source of a block says for certain: that it only reads, and where; or at least that it only computes.

The model need not wait for a block that only reads: the worker copies the rows of the locations that it may ask for and
goes on. What a block can do to a value that it has read: assign to a part of it, use an operator such as `+=` on it,
call a method that changes it, or give it to a function that might. So a block counts as one that only reads if it
assigns to parts of its own lists and dicts only, uses such operators on names that never hold a value that was read,
assigns nothing to the model, and calls only known methods and functions.

A block that does some of that, and otherwise only what is known here, may write, but still only computes: it can reach
neither files nor other objects of its process. Such blocks may share a process. If it has few locations, and skips no
module, it is also known where it may write. Every construct that this module does not know makes a block one of which
nothing is certain, which costs time and no correctness.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.block_host import ModuleOutline
from tracewire_engine.protocol.known_edits import Edit

__all__ = [
    "Account",
    "ModelPaths",
    "account_of",
    "is_container",
    "is_new",
    "joined",
    "literals",
    "parsed",
    "union",
]

#: Of a larger power of an integer, nothing is certain but that it takes long.
_LARGEST_POWER = 64

#: More locations than this are not copied in each step; the model waits for such a block instead.
MOST = 256

#: How many locations a block may have that writes, if the model's thread is not to wait for it: at each of them the GPU
#: waits in every step, whether the block wants it or not.
MOST_EDITED = 4

#: How many such locations a host may have at most.
MOST_VISITED = 16


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = frozenset({"math", "torch"})

#: Functions of Python that change none of their arguments.
_BUILTINS = _words(
    """
    abs all any bool dict enumerate float int len list max min print range repr reversed round set
    sorted str sum tuple zip
    """
)

#: Methods, of tensors, lists, dicts and sets, that change no tensor. Those of the second line return a new one.
_METHODS = _words(
    """
    append bfloat16 chunk contiguous copy count cpu detach diagonal double expand extend flatten
    float get half index insert int item items keys long narrow numel permute ravel reshape save
    select setdefault size split squeeze stride swapaxes t to tolist transpose type unbind unflatten
    unfold unsqueeze update values view view_as dim element_size is_contiguous is_floating_point
    expand_as reshape_as type_as movedim add
    """
)
_NEW = _words(
    """
    abs amax amin argmax argmin argsort clamp clone cos cosh cumsum diff dist div dot eq exp floor
    ge gt isfinite isinf isnan kthvalue le log log_softmax logsumexp lt matmul max mean median min
    mm mul ne neg norm outer pow prod quantile relu round rsqrt sigmoid sign sin softmax sort sqrt
    square std sub sum tanh topk tril triu var bmm cross mv nonzero unique gather index_select
    masked_select where all any roll flip repeat
    """
)

#: Methods of tensors that change them and nothing else.
_IN_PLACE = _words(
    """
    abs_ add_ clamp_ copy_ div_ exp_ fill_ index_add_ index_copy_ index_fill_ masked_fill_ mul_ neg_
    normal_ pow_ relu_ scatter_ scatter_add_ sqrt_ sub_ tanh_ uniform_ zero_
    """
)

#: Functions of `torch` and `torch.nn.functional` that change none of their arguments, and modules of torch.
_FUNCTIONS = _NEW | _words(
    """
    arange cat chunk einsum empty_like equal eye full full_like linspace narrow no_grad ones
    ones_like reshape split squeeze stack tensor transpose unsqueeze zeros zeros_like
    cosine_similarity normalize kl_div cross_entropy gelu silu layer_norm one_hot isclose allclose
    corrcoef cov trace
    """
)
#: How many positional arguments of functions do no more than choose: another one may say to work in place, or where the
#: result goes.
_POSITIONAL = {"relu": 1, "silu": 1, "gelu": 1, "normalize": 4, "norm": 4}
_TORCH_MODULES = frozenset({"nn", "functional", "linalg", "special"})

#: Attributes that are no method.
_ATTRIBUTES = _words(
    """
    T mT device dtype indices itemsize ndim real shape values nbytes is_cuda
    """
)

_SIDES = {"output": "output", "input": "input", "inputs": "input"}
_RUN, _SAMPLES = frozenset({"logits", "samples"}), "model.samples"

_numbers = msgspec.msgpack.Decoder(int | list[int])

_variables = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class _Unknown(Exception):
    """The block may do something that this module does not know."""


@dataclass(frozen=True)
class _Modules:
    """An expression that is one of these modules of the model, or a list of them."""

    paths: tuple[str, ...]
    several: bool = False


class _Named:
    """An expression with a meaning of its own: the tracer, `tracer.iter`, a module of Python, or the live values."""

    def __init__(self, what: str) -> None:
        self.what = what


_VALUE = _Named("value")
_Kind = _Modules | _Named


class ModelPaths:
    """The tree of a model's modules, by path, as blocks see it: the root is `model`.

    Args:
        modules: of the model.
        layers: the path of the list of decoder layers, without the root.
        taps: the locations of modules that the engine serves; all, if these are none.
    """

    def __init__(self, modules: Sequence[ModuleOutline], layers: str, taps: Collection[str] = ()) -> None:
        self._taps = frozenset(taps)
        self.children: dict[str, list[str]] = {"model": []}
        self.same: dict[str, str] = {}
        for one in modules:
            path = f"model.{one.path}" if one.path else "model"
            self.same[path] = path if one.same is None else f"model.{one.same}"
            self.children.setdefault(path, [])
            if one.path:
                above, _, name = path.rpartition(".")
                self.children.setdefault(above, []).append(name)
        self.layers = f"model.{layers}" if layers else ""

    def serves(self, location: str) -> bool:
        """Whether the engine serves a location. A block that asks for another one fails."""
        return not self._taps or location in self._taps or location.rpartition(".")[2] not in _SIDES

    def child(self, path: str, name: str) -> str | None:
        """The path of a module's child; `None` if there is none of this name."""
        return self.same[f"{path}.{name}"] if name in self.children[path] else None


@dataclass(frozen=True)
class Account:
    """What is certain of blocks.

    Attributes:
        reads: the locations that they may ask for, if they only read; otherwise `None`.
        edits: the locations that they may ask for, if they skip no module, and use no module's arguments; `None` if
            that is not certain, or if these are many.
        assigns: whether they may put another value in the place of one of the model.
        parts: of locations whose values they use as `value[0]` and the like alone, the numbers in the brackets.
        computes: whether they do nothing but compute with values that they have read or made.
        keeps: whether they change no array in place, so that each one that they save stays as it is.
        asks: all locations that they may ask for, if these are known and not too many.
        known: all that they write, if it is known; `None` if not. It says so of one block alone.
        held: how many bytes that holds on the device.
    """

    reads: frozenset[str] | None = None
    computes: bool = False
    edits: frozenset[str] | None = None
    assigns: bool = False
    parts: Mapping[str, frozenset[int]] = field(default_factory=dict)
    keeps: bool = False
    asks: frozenset[str] | None = None
    known: tuple[Edit, ...] | None = None
    held: int = 0

    @property
    def locations(self) -> frozenset[str] | None:
        """The locations that they may ask for, if these are known."""
        return self.edits if self.reads is None else self.reads


def account_of(block: Block, paths: ModelPaths) -> Account:
    """What a block's source says of it."""
    if block.helpers or block.shared or block.imports or not set(block.modules.values()) <= _MODULES:
        return Account()
    try:
        tree = parsed(block.source)
        variables = _variables.decode(block.variables)
        reader = _Reader(block, paths, variables)
        reader.read(tree)
    except Exception:  # whatever a source does to this module, the model's thread goes on
        return Account()
    found = frozenset(reader.found)
    parts = {where: frozenset(numbers) for where, numbers in reader.found.items() if numbers is not None}
    reads = found if not reader.writes and len(found) <= MOST else None
    # The arguments of a module are more than tensors.
    fit = not reader.skips and len(found) <= MOST_EDITED and not any(one.endswith(".input") for one in found)
    edits = found if fit else None
    # What blocks leave of samples is put in their place, as far as it is token ids.
    keeps = not reader.writes and not reader.changes
    asks = found if len(found) <= MOST else None
    return Account(reads, True, edits, reader.assigns or _SAMPLES in found, parts, keeps, asks)


def parsed(source: str) -> ast.Module:
    """The syntax tree of a block."""
    try:
        return ast.parse(source)
    except SystemError:  # of Python 3.11, if another thread has parsed something meanwhile
        return ast.parse(source)


class _Reader:
    """Goes through one block."""

    def __init__(self, block: Block, paths: ModelPaths, variables: Mapping[str, msgspec.Raw]) -> None:
        self._paths = paths
        #: The locations that the block may ask for, with the items of a value that it uses; `None` for all.
        self.found: dict[str, set[int] | None] = {}
        #: Whether it may change a value of the model, put another one in its place, or skip a module.
        self.writes = self.assigns = self.skips = False
        #: Whether it may change an array of its own.
        self.changes = False
        model, tracer, live = block.parameters
        self._names: dict[str, _Kind] = dict.fromkeys(variables, _VALUE)
        self._names.update({name: _Named(f"module {module}") for name, module in block.modules.items()})
        self._names.update(
            {name: _Modules((paths.same[f"model.{path}" if path else "model"],)) for name, path in block.paths.items()}
        )
        self._names.update({model: _Modules(("model",)), tracer: _Named("tracer"), live: _Named("live")})
        self._given = frozenset(self._names)
        self._assigned: dict[str, list[ast.expr | None]] = {}
        #: The names to which the block applies an operator such as `+=`.
        self._changed: set[str] = set()
        #: The numbers that a name can stand for, and those in a list, where they are known.
        self._numbers: dict[str, tuple[int, ...]] = {}
        self._lists: dict[str, tuple[int, ...]] = {}
        for name, encoded in variables.items():
            self._know(name, encoded)

    def read(self, tree: ast.Module) -> None:
        """Go through the block.

        Raises:
            _Unknown: it may do something that this module does not know.
        """
        self._collect(tree)
        self._body(tree.body)

    def _know(self, name: str, encoded: msgspec.Raw) -> None:
        """Note a variable that is a number, or a list of some."""
        try:
            found = _numbers.decode(encoded)
        except msgspec.DecodeError:
            return
        if isinstance(found, list):
            self._lists[name] = tuple(found)
        else:
            self._numbers[name] = (found,)

    def _run_through(self, target: ast.expr, values: ast.expr) -> None:
        """Note the numbers that the variable of a loop can stand for."""
        if not isinstance(target, ast.Name) or len(self._assigned[target.id]) > 1 or target.id in self._changed:
            return
        known = self._lists.get(values.id) if isinstance(values, ast.Name) else literals(values)
        if known is not None:
            self._numbers[target.id] = known

    def _collect(self, tree: ast.Module) -> None:
        """Note what each name is assigned; `None` stands for something that only running the block can tell."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, None)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._changed.add(node.target.id)
        # A list that the block could extend says nothing.
        loops = [node.iter for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
        used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        looped = [node.id for node in loops if isinstance(node, ast.Name)]
        self._lists = {name: held for name, held in self._lists.items() if used.count(name) == looped.count(name)}
        if not self._given.isdisjoint(self._assigned) or not _BUILTINS.isdisjoint(self._given | self._assigned.keys()):
            raise _Unknown
        for name in self._assigned:
            self._names[name] = _VALUE

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, None)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr):
            self._expression(node.value)
        elif isinstance(node, ast.Assign):
            kind = self._expression(node.value)
            for target in node.targets:
                self._target(target, kind)
        elif isinstance(node, ast.AugAssign):
            self._value(node.value)
            self._change(node)
        elif isinstance(node, ast.For):
            kind = self._items_of(node.iter)
            if isinstance(kind, _Modules) and not kind.several:
                kind = _Modules(tuple(self._items(kind)), several=True)
            self._target(node.target, _Modules(kind.paths) if isinstance(kind, _Modules) and kind.several else _VALUE)
            self._loops(kind)
            self._run_through(node.target, node.iter)
            self._body(node.body)
            self._body(node.orelse)
        elif isinstance(node, ast.If):
            self._value(node.test)
            self._body(node.body)
            self._body(node.orelse)
        elif not isinstance(node, ast.Pass | ast.Break | ast.Continue):
            raise _Unknown

    @staticmethod
    def _loops(kind: _Kind) -> None:
        if isinstance(kind, _Named) and kind.what not in ("value", "steps"):
            raise _Unknown

    def _target(self, target: ast.expr, kind: _Kind, *, names_only: bool = False) -> None:
        if names_only and isinstance(target, ast.Subscript | ast.Attribute):
            raise _Unknown
        if isinstance(target, ast.Name):
            if kind is _VALUE:
                return
            if not isinstance(kind, _Modules) or len(self._assigned[target.id]) > 1:
                raise _Unknown
            self._names[target.id] = kind
        elif isinstance(target, ast.Subscript | ast.Attribute):
            if kind is not _VALUE:
                raise _Unknown
            self._put(target)
        elif isinstance(target, ast.Tuple | ast.List) and kind is _VALUE:
            for one in target.elts:
                if not isinstance(one, ast.Name):
                    raise _Unknown
        else:
            raise _Unknown

    def _change(self, node: ast.AugAssign) -> None:
        """Take an operator such as `+=`."""
        target = node.target
        if isinstance(target, ast.Name):
            if target.id not in self._assigned or self._names[target.id] is not _VALUE:
                raise _Unknown
            self.writes |= not self._is_own(target.id, is_new)
            counts = isinstance(node.value, ast.Constant) and self._is_own(target.id, _is_constant)
            self.changes |= not counts and not self._is_own(target.id, is_container)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            self._put(target)
            # An item of a list of the block's own may be a value that was read.
            self.writes = True
        else:
            raise _Unknown

    def _put(self, target: ast.Subscript | ast.Attribute) -> None:
        """Take what is assigned to a part of a value, or to a location of the model."""
        if isinstance(target, ast.Subscript):
            self._value(target.value)
            self._value(target.slice)
            if isinstance(target.value, ast.Name) and self._is_own(target.value.id, is_container):
                return
        else:
            owner = self._expression(target.value)
            if isinstance(owner, _Named):
                known = owner.what == "residual" and target.attr == "output"
            else:
                run = owner.paths == ("model",) and target.attr in _RUN
                known = not owner.several and (target.attr in _SIDES or run)
                if known:
                    self._of_modules(owner, target.attr)
            if not known:
                raise _Unknown
            # What is assigned to the residual stream changes its halves in place.
            self.assigns |= not isinstance(owner, _Named)
        self.writes = True

    def _items_of(self, node: ast.expr) -> _Kind:
        """Take what a loop goes through: also a `range` of any length, since each turn of a loop can be interrupted."""
        return self._call(node, looped=True) if isinstance(node, ast.Call) else self._expression(node)

    def _is_own(self, name: str, check: Callable[[ast.expr], bool]) -> bool:
        """Whether all that a name is ever assigned passes a check, and something is."""
        values = self._assigned.get(name, ())
        return bool(values) and all(value is not None and check(value) for value in values)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> None:
        if self._expression(node) is not _VALUE:
            raise _Unknown

    def _expression(self, node: ast.expr | None) -> _Kind:
        if node is None or isinstance(node, ast.Constant):
            return _VALUE
        if isinstance(node, ast.Name):
            kind = self._names.get(node.id)
            if kind is None or not isinstance(node.ctx, ast.Load):
                raise _Unknown
            return kind
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if not isinstance(node, _PLAIN) or (isinstance(node, ast.BinOp) and _may_grow(node)):
            raise _Unknown
        self._parts(node)
        return _VALUE

    def _parts(self, node: ast.AST) -> None:
        """Go through the parts of an expression that only combines values."""
        parts = list(ast.iter_child_nodes(node))
        for part in parts:
            if isinstance(part, ast.comprehension):
                self._target(part.target, _VALUE, names_only=True)
                if self._items_of(part.iter) is not _VALUE:
                    raise _Unknown
                self._run_through(part.target, part.iter)
                for condition in part.ifs:
                    self._value(condition)
        for part in parts:
            if isinstance(part, ast.expr):
                self._value(part)

    def _attribute(self, node: ast.Attribute) -> _Kind:
        if not isinstance(node.ctx, ast.Load):
            raise _Unknown
        return self._attribute_of(self._expression(node.value), node.attr)

    def _attribute_of(self, kind: _Kind, name: str) -> _Kind:
        if isinstance(kind, _Modules):
            return self._of_modules(kind, name)
        if kind.what == "tracer" and name == "iter":
            return _Named("iter")
        if kind.what == "live" or (kind is _VALUE and name in _ATTRIBUTES):
            return _VALUE
        if kind.what.startswith("module ") and name in ("pi", "e", "inf", "nan", "float32", "float16", "bfloat16"):
            return _VALUE
        if kind.what.startswith("module torch") and (name in _TORCH_MODULES or name in ("int64", "float64", "int32")):
            return _VALUE if name not in _TORCH_MODULES else _Named(f"{kind.what}.{name}")
        if kind.what == "residual" and name == "output":
            return _VALUE
        raise _Unknown

    def _of_modules(self, kind: _Modules, name: str) -> _Kind:
        if kind.several:
            raise _Unknown
        if name in _SIDES:
            self._note(f"{path}.{_SIDES[name]}" for path in kind.paths)
            return _VALUE
        if kind.paths == ("model",) and name in _RUN:
            self._note([f"model.{name}"])
            return _VALUE
        children = [self._paths.child(path, name) for path in kind.paths]
        known = tuple(child for child in children if child is not None)
        if len(known) < len(children):
            raise _Unknown
        return _Modules(known)

    def _subscript(self, node: ast.Subscript) -> _Kind:
        if not isinstance(node.ctx, ast.Load):
            raise _Unknown
        value = node.value
        if isinstance(value, ast.Attribute) and isinstance(value.ctx, ast.Load):
            # Once: sources that nest deep would take for ever otherwise.
            owner = self._expression(value.value)
            if self._is_item(owner, value.attr, node.slice):
                return _VALUE
            kind = self._attribute_of(owner, value.attr)
        else:
            kind = self._expression(value)
        if isinstance(kind, _Modules):
            return self._item_of(kind, node.slice)
        self._value(node.slice)
        if kind.what == "iter":
            return _Named("steps")
        if kind is not _VALUE:
            raise _Unknown
        return _VALUE

    def _is_item(self, owner: _Kind, name: str, item: ast.expr) -> bool:
        """Whether an expression is an item of a module's output, such as `layer.output[0]`. If so, it is noted."""
        if name != "output" or not isinstance(owner, _Modules) or owner.several:
            return False
        if not isinstance(item, ast.Constant) or type(item.value) is not int or item.value < 0:
            return False
        self._note([f"{path}.output" for path in owner.paths], item.value)
        return True

    def _item_of(self, kind: _Modules, index: ast.expr) -> _Kind:
        items = self._items(kind)
        known = self._known(index)
        if known is not None and all(-len(items) <= place < len(items) for place in known):
            return _Modules(tuple(items[place] for place in known))
        try:
            place = ast.literal_eval(index)
        except ValueError:
            # Any of them, which only running the block can tell.
            self._value(index) if not isinstance(index, ast.Slice) else self._parts(index)
            return _Modules(tuple(items), several=isinstance(index, ast.Slice))
        if not isinstance(place, int) or isinstance(place, bool) or not -len(items) <= place < len(items):
            raise _Unknown
        return _Modules((items[place],))

    def _known(self, node: ast.expr) -> tuple[int, ...] | None:
        """The numbers that an expression can come to, where they are known, such as those of `layer + 1`."""
        if isinstance(node, ast.Name):
            return self._numbers.get(node.id)
        if isinstance(node, ast.Constant):
            return (node.value,) if type(node.value) is int else None
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
            return None
        left, right = self._known(node.left), self._known(node.right)
        if left is None or right is None or len(left) * len(right) > MOST:
            return None
        sign = 1 if isinstance(node.op, ast.Add) else -1
        return tuple(one + sign * other for one in left for other in right)

    def _items(self, kind: _Modules) -> list[str]:
        if kind.several or len(kind.paths) != 1:
            raise _Unknown
        path = kind.paths[0]
        return [self._paths.same[f"{path}.{name}"] for name in self._paths.children[path]]

    def _call(self, node: ast.Call, *, looped: bool = False) -> _Kind:
        for word in node.keywords:
            if word.arg in (None, "out", "inplace", "key"):
                raise _Unknown
            self._value(word.value)
        function = node.func
        if isinstance(function, ast.Name):
            if function.id not in _BUILTINS or (function.id == "range" and not looped and literals(node) is None):
                raise _Unknown
            self._arguments(node)
            return _VALUE
        if not isinstance(function, ast.Attribute):
            raise _Unknown
        kind, name = self._expression(function.value), function.attr
        if isinstance(kind, _Modules):
            return self._of_module(kind, name, node)
        self._arguments(node)
        if kind is _VALUE and name in _IN_PLACE:
            self.writes = True
            return _VALUE
        if kind.what == "tracer" and name in ("all", "stop"):
            return _Named("steps") if name == "all" else _VALUE
        if kind.what.startswith("module torch") and name in _FUNCTIONS:
            most = _POSITIONAL.get(name)
            if any(isinstance(one, ast.Starred) for one in node.args) or (most and len(node.args) > most):
                raise _Unknown
            return _VALUE
        if kind.what == "module math" or (kind is _VALUE and name in (_METHODS | _NEW)):
            return _VALUE
        raise _Unknown

    def _of_module(self, kind: _Modules, name: str, node: ast.Call) -> _Kind:
        if name == "skip" and not kind.several:
            self._arguments(node)
            self.writes = self.skips = True
            return _VALUE
        if kind.paths != ("model",) or name != "residual" or len(node.args) != 1 or node.keywords:
            raise _Unknown
        layers = self._item_of(_Modules((self._paths.layers,)), node.args[0])
        assert isinstance(layers, _Modules)
        self._note(f"{path}.output" for path in layers.paths)
        return _Named("residual")

    def _note(self, locations: Iterable[str], item: int | None = None) -> None:
        """Note that the block may ask for values, of which it uses this item, or all."""
        for location in locations:
            known = self.found.setdefault(location, set())
            if item is None or known is None:
                self.found[location] = None
            else:
                known.add(item)

    def _arguments(self, node: ast.Call) -> None:
        for argument in node.args:
            self._value(argument.value if isinstance(argument, ast.Starred) else argument)


#: Expressions that combine values into a new one, or choose one.
_PLAIN = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Slice),
    *(ast.JoinedStr, ast.FormattedValue, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)

_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)


def _may_grow(node: ast.BinOp) -> bool:
    """Whether a single operation on small numbers may take for ever."""
    if isinstance(node.op, ast.LShift):
        return True
    if not isinstance(node.op, ast.Pow):
        return False
    exponent = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
    known = exponent.value if isinstance(exponent, ast.Constant) else None
    return not isinstance(known, int | float) or known > _LARGEST_POWER


def literals(node: ast.expr) -> tuple[int, ...] | None:
    """The numbers that an expression goes through, if it is a literal or a `range` of literals."""
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            steps = range(*[ast.literal_eval(one) for one in node.args])
            return tuple(steps) if len(steps) <= MOST else None
        found = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    if isinstance(found, list | tuple) and all(type(one) is int for one in found):
        return tuple(found)
    return None


def is_container(node: ast.expr) -> bool:
    """Whether an expression makes a list, dict or set, which may be saved at once."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "save":
        return is_container(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("list", "dict", "set")
    return isinstance(node, _DISPLAYS)


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression is a number or a text."""
    return isinstance(node, ast.Constant)


def is_new(node: ast.expr) -> bool:
    """Whether an expression makes an object that is no value that was read, nor a part of one."""
    if isinstance(node, ast.Constant | ast.BinOp | ast.Compare | ast.JoinedStr) or is_container(node):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not | ast.USub | ast.Invert)
    if isinstance(node, ast.IfExp):
        return is_new(node.body) and is_new(node.orelse)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "save":
            return is_new(node.func.value)
        return node.func.attr in _NEW - {"max", "min", "where", "all", "any", "round", "relu"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("int", "float", "len", "bool", "str", "range", "round")
    return False


def union(found: Iterable[Account]) -> Account:
    """What is certain of several blocks together."""
    accounts = list(found)
    if len(accounts) == 1 and accounts[0].known is None:
        return accounts[0]
    return Account(
        joined([one.reads for one in accounts]),
        all(one.computes for one in accounts),
        joined([one.edits for one in accounts]),
        any(one.assigns for one in accounts),
        _joined_parts(accounts),
        all(one.keeps for one in accounts),
        joined([one.asks for one in accounts]),
    )


def _joined_parts(accounts: Sequence[Account]) -> dict[str, frozenset[int]]:
    parts: dict[str, frozenset[int]] = {}
    whole: set[str] = set()
    for one in accounts:
        if one.locations is None:
            return {}
        whole |= one.locations - one.parts.keys()
        for location, numbers in one.parts.items():
            parts[location] = parts.get(location, frozenset()) | numbers
    return {location: numbers for location, numbers in parts.items() if location not in whole}


def joined(locations: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    """All of these locations; `None` if one of them is."""
    known = [one for one in locations if one is not None]
    return frozenset[str]().union(*known) if len(known) == len(locations) else None
