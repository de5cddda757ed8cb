"""What nnsight's users have around their blocks: objects, classes, networks, and containers of them."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import http
import math
import operator
import pathlib
import re
import types
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.block_runs import run
from tests.support.bus_engine import engine_info
from tracewire import BlockError, UntransportableVariable, intervention
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.packing import unpack

SCALE = 3.0
TREE = ModuleTree(engine_info())


def arriving(value: Any) -> Any:
    """`value` as a block has it on the engine."""

    @intervention
    def watch(model, tracer, live):
        out = value

    return run(watch.block())["out"]


def doubled(x):
    return 2 * x * SCALE


class Site(enum.Enum):
    """Where to read."""

    MLP = "mlp"
    ATTENTION = "attn"

    @property
    def key(self) -> str:
        return f"{self.value}.output"


class Depth(enum.IntEnum):
    EARLY = 1
    LATE = enum.auto()


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Name(enum.StrEnum):
    ONE = "one"


Made = enum.Enum("Made", "A B")


class Span(NamedTuple):
    start: int
    stop: int = 7

    def __len__(self) -> int:
        return self.stop - self.start


Pair = collections.namedtuple("Pair", "left right", defaults=[Site.MLP])


@dataclass
class Config:
    """What to do."""

    layer: int
    site: Site = Site.MLP
    weights: list[float] = field(default_factory=list)
    count: ClassVar[int] = 5
    _: KW_ONLY
    seed: InitVar[int] = 0
    scale: float = SCALE

    def __post_init__(self, seed: int) -> None:
        self.seeded = seed

    def scaled(self, x):
        return doubled(x) + self.scale


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    inner: Config


class Linked:
    def __init__(self) -> None:
        self.me = self
        self.function = doubled
        self.children = [Span(1), {Site.MLP: self}]


class Base(nn.Module):
    def encode(self, x):
        return torch.relu(self.encoder(x))


class Sae(Base):
    """A sparse autoencoder."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, features)
        self.W_dec = nn.Parameter(torch.randn(features, width))
        self.register_buffer("mean", torch.arange(width, dtype=torch.float32))
        self.config = Config(layer=2)
        self.activation = torch.relu
        self.dropout = nn.Dropout(0.5)
        self.absent = None
        self.register_parameter("bias", None)

    def forward(self, x):
        return self.dropout(self.encode(x - self.mean)) @ self.W_dec


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.twice = nn.ModuleList([self.a, self.a])


# --- values -----------------------------------------------------------------------------------------------------------

SAME = {
    "a range": range(3, 20, 2),
    "a slice": slice(1, None),
    "an ellipsis": ...,
    "an index": (slice(None), ..., 3, None),
    "a device": torch.device("cpu"),
    "a shape": torch.randn(2, 3).shape,
    "a dict of devices": {"a": torch.device("cpu"), "b": 1, ("c", 2): [torch.device("cuda", 1)]},
    "a path": pathlib.Path("/tmp/x"),
    "a pattern": re.compile("a+", re.IGNORECASE),
    "an ordered dict": collections.OrderedDict(b=1, a=2),
    "a counter": collections.Counter("hello"),
    "a deque": collections.deque([1, 2], maxlen=3),
    "a namespace": types.SimpleNamespace(layer=3, shape=torch.Size([2])),
    "arguments": argparse.Namespace(layer=3, device=torch.device("cpu")),
    "sets": ({1, (2, 3)}, frozenset({"a"})),
    "keys that are tuples": {(0, "head"): 1.5, (1, None): [2]},
    "an installed enum": [http.HTTPStatus.OK, {http.HTTPStatus.NOT_FOUND}],
    "functions": [math.sqrt, torch.relu, nn.functional.gelu, np.exp, len],
    "classes": {"linear": nn.Linear, "float": float, "dtype": torch.float16},
    "a cell without anything in it": [[], {}, (), set(), collections.OrderedDict()],
}


@pytest.mark.parametrize("case", SAME)
def test_values_arrive_as_what_they_are(case: str) -> None:
    value = SAME[case]
    arrived = arriving(value)
    assert type(arrived) is type(value)
    assert arrived == value


def test_a_default_dict_keeps_its_factory_and_a_partial_its_arguments() -> None:
    counts = arriving(collections.defaultdict(list, a=[1]))
    counts["b"].append(2)
    assert counts == {"a": [1], "b": [2]}
    arrived = arriving(functools.partial(doubled, 4.0))
    assert arrived() == 24.0
    keyword = arriving(functools.partial(torch.sum, dim=0, keepdim=True))
    assert keyword(torch.ones(2, 3)).tolist() == [[2, 2, 2]]
    assert arriving(operator.attrgetter) is operator.attrgetter


def test_enumerations() -> None:
    arrived = arriving([Site.MLP, {Site.ATTENTION: Depth.LATE}, Access.READ | Access.WRITE, Name.ONE, Made.B])
    site, mapping, access, name, made = arrived
    assert (site.name, site.value, site.key) == ("MLP", "mlp", "mlp.output")
    assert type(site).__name__ == "Site"
    ((other, depth),) = mapping.items()
    assert type(other) is type(site)
    assert other is type(site).ATTENTION
    assert (depth, depth.name) == (2, "LATE")
    assert type(access)["READ"] in access
    assert access.value == 3
    assert name == "one"
    assert made.name == "B"
    assert repr(site) == "<Site.MLP: 'mlp'>"


def test_the_class_of_an_enumeration_and_its_members_are_one() -> None:
    site = Site.MLP

    @intervention
    def watch(model, tracer, live):
        same = site is Site.MLP
        both = [one.value for one in Site]

    scope = run(watch.block())
    assert scope["same"] is True
    assert scope["both"] == ["mlp", "attn"]


def test_namedtuples() -> None:
    span, pair = arriving([Span(3), Pair(Span(1, 2))])
    assert (span.start, span.stop, len(span)) == (3, 7, 4)
    assert type(span).__name__ == "Span"
    assert type(pair.left) is type(span)
    assert pair.right.key == "mlp.output"
    assert pair._replace(right=1).right == 1


class Private:
    """Python makes `_Private__scale` of its attribute's name."""

    __scale = 1.0
    __slots__ = ("__dict__", "__offset")

    def __init__(self, scale, offset):
        self.__scale = scale
        self.__offset = offset

    def score(self, x):
        return self.__scale * x + self.__offset


class _Derived(Private):
    def more(self):
        self.__own = 1
        return self.score(self.__own)


class PrivateNet(torch.nn.Module):
    __bias = 0.0

    def __init__(self):
        super().__init__()
        self.__bias = 5.0

    def forward(self, x):
        return x + self.__bias


def test_private_attributes() -> None:
    first, derived, net = arriving([Private(8.0, 0.5), _Derived(2.0, 0.25), PrivateNet()])
    assert first.score(2) == 16.5
    assert derived.more() == 2.25
    assert net(torch.ones(1)).item() == 6.0
    assert [type(one).__name__ for one in (first, derived, net)] == ["Private", "_Derived", "PrivateNet"]
    assert isinstance(derived, type(first))


def test_dataclasses() -> None:
    frozen = arriving(Frozen("a", Config(2, weights=[1.5], seed=4)))
    assert frozen.name == "a"
    assert (frozen.inner.layer, frozen.inner.weights, frozen.inner.seeded) == (2, [1.5], 4)
    assert frozen.inner.site.key == "mlp.output"
    assert frozen.inner.scaled(1.0) == 9.0
    assert dataclasses.fields(frozen.inner)[0].name == "layer"
    assert [one.name for one in dataclasses.fields(frozen.inner)] == [one.name for one in dataclasses.fields(Config)]
    made = type(frozen.inner)(7, seed=1)
    assert (made.layer, made.scale, made.seeded, made.count) == (7, SCALE, 1, 5)
    assert repr(made) == repr(Config(7, seed=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.name = "b"


def test_objects_that_refer_to_each_other() -> None:
    arrived = arriving(Linked())
    assert arrived.me is arrived
    assert arrived.function(1.0) == 6.0
    span, mapping = arrived.children
    assert span.stop == 7
    assert list(mapping.values()) == [arrived]
    first, second, linked = arriving([value := Config(1), value, {"a": value}])
    assert first is second
    assert linked["a"] is first


def test_a_bound_method_takes_its_object_along() -> None:
    assert arriving(Config(1, scale=0.5).scaled)(1.0) == 6.5
    assert arriving(Pair._make)([1, 2]).right == 2


def test_the_model_s_modules_in_lists_dicts_and_slices() -> None:
    layers = TREE.model.layers
    sites = {"last": layers[-1], 2: [layers[0].mlp], Site.MLP: layers[1]}
    middle, chosen, (first, *_) = layers[1:3], [layers[i] for i in (0, 3)], tuple(layers)

    @intervention
    def watch(model, tracer, live):
        out = [middle, chosen, first, sites["last"], sites[2], list(sites.values())[2]]

    block = watch.block()
    assert run(block)["out"] == [
        ["model.layers.1", "model.layers.2"],
        ["model.layers.0", "model.layers.3"],
        "model.layers.0",
        "model.layers.3",
        ["model.layers.0.mlp"],
        "model.layers.1",
    ]


# --- networks ---------------------------------------------------------------------------------------------------------


def test_a_network_of_one_s_own() -> None:
    sae = Sae(4, 6)
    x = torch.randn(2, 4)

    @intervention
    def watch(model, tracer, live):
        features = sae.encode(x)
        out = sae(x)
        whole = sae

    scope = run(watch.block())
    arrived = scope["whole"]
    sae.eval()
    assert torch.equal(scope["features"], sae.encode(x))
    assert torch.equal(scope["out"], sae(x))
    assert not any(module.training for module in arrived.modules())
    assert not any(parameter.requires_grad for parameter in arrived.parameters())
    assert {name: one.tolist() for name, one in arrived.state_dict().items()} == {
        name: one.tolist() for name, one in sae.state_dict().items()
    }
    assert isinstance(arrived, nn.Module)
    assert type(arrived).__name__ == "Sae"
    assert arrived.config.site.key == "mlp.output"
    assert arrived.activation is torch.relu
    assert copy.deepcopy(arrived).bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_networks_of_torch_keep_their_dtype(dtype: torch.dtype) -> None:
    network = nn.Sequential(
        collections.OrderedDict(
            one=nn.Linear(3, 4),
            norm=nn.LayerNorm(4),
            act=nn.GELU(),
            many=nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Identity()}),
            given=nn.ParameterList([torch.ones(2)]),
        )
    ).to(dtype)
    arrived = arriving(network)
    assert repr(arrived) == repr(network)
    assert arrived.one.weight.dtype == dtype
    x = torch.randn(2, 3, dtype=dtype)
    assert torch.equal(arrived.norm(arrived.one(x)), network.norm(network.one(x)))
    assert arrived.given[0].tolist() == [1, 1]
    attention = nn.MultiheadAttention(4, 2).to(dtype).eval()
    y = torch.randn(3, 4, dtype=dtype)
    assert torch.equal(arriving(attention)(y, y, y)[0], attention(y, y, y)[0])


def test_weights_that_are_tied_stay_so() -> None:
    arrived = arriving(Tied())
    assert arrived.a.weight is arrived.b.weight
    assert arrived.twice[0] is arrived.a
    assert len(list(arrived.parameters())) == 1


def test_the_source_is_the_same_whatever_the_weights_are() -> None:
    """The engine compiles it once, and what the arrays have in common with those before is uploaded once."""

    @intervention
    def watch(model, tracer, live, sae):
        out = sae

    first, second = (watch(sae=Sae(4, 6)).block() for _ in range(2))
    assert first.helpers == second.helpers
    assert first.variables != second.variables
    sae = Sae(4, 6)
    assert watch(sae=sae).block() == watch(sae=sae).block()
    assert b"pickle" not in b"".join(helper.source.encode() for helper in first.helpers)


def test_the_values_of_objects_travel_as_data_and_not_in_the_source() -> None:
    @intervention
    def watch(model, tracer, live, config, span):
        out = config, span

    one = watch(config=Config(3, weights=[1.25]), span=range(5)).block()
    two = watch(config=Config(8, weights=[7.5, 8.5]), span=range(9)).block()
    assert one.helpers == two.helpers
    assert run(two)["out"][0].weights == [7.5, 8.5]
    assert set(unpack(two.variables)) == {"SCALE", "_tw_config_parts", "_tw_span_parts"}


# --- classes ----------------------------------------------------------------------------------------------------------


def test_classes_of_one_s_own_by_name_by_another_and_below_others() -> None:
    alias = Sae

    @dataclass
    class Local(Config):
        extra: int = 1

        def more(self):
            return [Local, Site, len(self.weights), super().scaled(1.0)]

    @intervention
    def watch(model, tracer, live):
        made = Local(3, extra=2)
        more = made.more()
        width = alias(2, 3).encoder.weight.shape
        again = Sae is alias
        checked = isinstance(made, Config)

    scope = run(watch.block())
    assert scope["made"].extra == 2
    assert scope["more"][0].__name__ == "Local"
    assert scope["more"][2:] == [0, 9.0]
    assert tuple(scope["width"]) == (3, 2)
    assert scope["again"] is True
    assert scope["checked"] is True


# --- attributes of an object that stays here --------------------------------------------------------------------------


class Service:
    """What a user's experiment looks like: it holds what cannot travel beside what the block uses."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.config = Config(layer)
        self.model = TREE
        self.directions = {"a": np.ones(3)}
        self.log = open  # a file, a client, a lock
        self.lock = __import__("threading").Lock()

    @property
    def previous(self) -> int:
        return self.layer - 1

    def helper(self, x):
        return x + self.layer

    def reading(self):
        @intervention
        def watch(model, tracer, live):
            out = (self.layer, self.config.scaled(1.0), self.directions["a"], self.model.model.layers, self.previous)

        return watch.block()

    def calling(self):
        @intervention
        def watch(model, tracer, live):
            out = self.helper(self.layer)

        return watch.block()

    def whole(self):
        @intervention
        def watch(model, tracer, live):
            out = [self]

        return watch.block()

    def changing(self):
        @intervention
        def watch(model, tracer, live):
            self.acts = model.output

        return watch.block()

    def mistaken(self):
        @intervention
        def watch(model, tracer, live):
            out = self.layr

        return watch.block()


def test_attributes_of_self_travel_each_by_itself() -> None:
    model = types.SimpleNamespace(model=types.SimpleNamespace(layers="the layers"))
    layer, scaled, direction, layers, previous = run_with(Service(4).reading(), {"": model})["out"]
    assert (layer, scaled, direction.tolist(), layers, previous) == (4, 9.0, [1, 1, 1], "the layers", 3)


def run_with(block: Any, paths: dict[str, Any]) -> dict[str, Any]:
    """Run a block in which modules of the model stand for these."""
    for name, path in block.paths.items():
        block.paths[name] = paths[path]
    return run(block)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("calling", UntransportableVariable, "'self.lock' is of type _thread.lock: .* as in `layer = config.layer`"),
        ("whole", UntransportableVariable, "'self.lock' is of type _thread.lock"),
        ("changing", BlockError, "cannot change 'self.acts': the engine has a copy of 'self'.* `acts = ...save"),
        ("mistaken", BlockError, "'self.layr' is not defined: 'Service' object has no attribute 'layr'"),
    ],
)
def test_what_self_cannot_lend_is_refused(method: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(Service(4), method)()


def test_an_object_that_is_read_in_one_function_and_called_in_another() -> None:
    config = Config(5)

    def helper(x):
        return config.scaled(x)

    @intervention
    def watch(model, tracer, live):
        out = config.layer, helper(1.0)

    assert run(watch.block())["out"] == (5, 9.0)


def test_attributes_of_an_installed_object_that_cannot_travel() -> None:
    generator = torch.Generator()

    @intervention
    def watch(model, tracer, live):
        out = generator.device

    assert run(watch.block())["out"] == torch.device("cpu")
