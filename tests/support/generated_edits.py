"""Random blocks that change what they read in ways that their source shows, or nearly so.

Each statement changes the value of a layer, gives it another name, saves it or computes with it. Some blocks fail, stop
early, or write under a condition.
"""

from __future__ import annotations

import random

__all__ = ["edit_block"]

_LOOPS = [*["tracer.iter[:]"] * 5, "tracer.iter[1:3]", "tracer.iter[2]", "tracer.all()", "tracer.iter[1:]"]
_VECTORS = [
    *("vector", "vector * 0.5", "by['key']", "unit", "(vector - 0.5)", "vector.to(torch.float64)", "-vector"),
    *("vector.to(h.dtype)", "vector.abs()", "longer", "live.way", "live.alpha * vector", "live.alpha * live.way"),
    *("(2 * live.count) * vector", "live.way.to(h.dtype) * factors[0]", "lately"),
]
_NUMBERS = [
    "2",
    "0.5",
    "-1.25",
    "True",
    "0",
    "factors[0]",
    "vector[1]",
    "vector.norm()",
    "step",
    "1e30",
    "float('nan')",
    "live.alpha",
    "live.count + 1",
    "live.on",
]
_PARTS = [
    *("[:]", "[-1]", "[0]", "[-1:]", "[:, 1]", "[:, 1:3]", "[..., 2]", "[...]", "[:1]", "[0, 1]", "[-1, :2]"),
    *("[:, ::2]", "[1:]", "[None]", "[:, :1]"),
]
_METHODS = [
    *(".abs()", ".sum()", ".mean(dim=-1, keepdim=True)", ".norm(dim=-1, keepdim=True)", ".clone()", ".tanh()"),
    *(".exp()", ".float()", ".to(torch.float32)", ".double()", ".clamp(-1, 1)", ".sum(dim=-1)[:, None]"),
    *(".detach()", ".type_as(h)", ".square()", ".sqrt()", ".sigmoid()", ".relu()", ".sign()"),
]
_IN_PLACE = [
    "mul_({})",
    "add_({})",
    "sub_({})",
    "copy_({})",
    "div_({})",
    "fill_(2)",
    "zero_()",
    "neg_()",
    "clamp_(-1, 1)",
]
_LOGITS = ["l[:, 3] = 2.0", "l *= 2", "l += 1", "l[-1] -= 0.5", "l[:, :10] = -1e9", "l[:] = l * factors[1]"]


class _Source:
    """A block under way."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # nosec B311
        self._names: list[str] = []

    def _one(self, of: list[str]) -> str:
        return self._random.choice(of)

    def _value(self) -> str:
        """An expression."""
        match self._random.randrange(6):
            case 0:
                return self._one(_VECTORS)
            case 1:
                return self._one(_NUMBERS)
            case 2:
                return self._one(self._names)
            case 3:
                return f"{self._one(self._names)} {self._one(list('*+-/'))} {self._one(_VECTORS + _NUMBERS)}"
            case 4:
                along = self._one(["[:, None]", ".unsqueeze(-1)", ""])
                return f"({self._one(self._names)} @ unit){along} * {self._one(['unit', 'vector'])}"
        return self._one(self._names) + self._one(_METHODS)

    def _statement(self) -> str:
        name = self._one(self._names)
        match self._random.randrange(8):
            case 0:
                return f"{name} {self._one(list('+-*/'))}= {self._value()}"
            case 1:
                return f"{name}{self._one(_PARTS)} = {self._value()}"
            case 2:
                return f"{name}{self._one(_PARTS)} {self._one(list('+-*/'))}= {self._value()}"
            case 3:
                other = self._one(["g", "q"])
                made = f"{other} = {name}{self._one([*_PARTS, '', '', '.clone()'])}"
                self._names.append(other)
                return made
            case 4:
                return f"{name}.{self._one(_IN_PLACE).format(self._value())}"
            case 5:
                return f"kept.append({name}{self._one(['', '.clone()', '[-1]', '.sum()'])})"
            case 6:
                then = self._one(["g = 1", "h = 2", "tracer.stop()", "h += 1", "q = h"])
                return f"if step {self._one(['==', '<', '>='])} {self._random.randint(0, 3)}:\n        {then}"
        return self._one([f"x = {self._value()}", "y = [h, 1]", "n = 0", "z = {}"])

    def _layer(self, layer: int) -> list[str]:
        """What the block does at a layer."""
        if self._random.random() < 0.3:
            value = f"model.residual({layer}).output"
        else:
            value = f"model.model.layers[{layer}].output" + self._one(["[0]", "[0]", "[1]"])
        self._names = ["h"]
        return [f"h = {value}", *[self._statement() for _ in range(self._random.randint(1, 5))]]

    def block(self) -> str:
        """All of it."""
        layers = sorted(self._random.sample(range(3), self._random.choice([1, 1, 2, 3])))
        body = [line for layer in layers for line in self._layer(layer)]
        if self._random.random() < 0.3:
            body += ["l = model.logits", *self._random.sample(_LOGITS, self._random.choice([1, 2]))]
        if self._random.random() < 0.1:
            body.append("1 / (step - 1)")
        if self._random.random() < 0.3:
            body.insert(self._random.randrange(len(body)), f"lately = {self._one(['live.way', 'live.alpha * vector'])}")
        lines = [f"for step in {self._one(_LOOPS)}:", *[f"    {line}" for line in body]]
        first = ["kept = [].save()", "unit = vector / vector.norm()", "lately = live.way"]
        return "\n".join([*first, *lines]) + "\n"


def edit_block(seed: int) -> str:
    """A block of a seed, for a model with three layers.

    It has the variables `vector`, `longer`, `by` and `factors`, and the live parameters `alpha`, `count`, `way`, `on`.
    """
    return _Source(seed).block()
