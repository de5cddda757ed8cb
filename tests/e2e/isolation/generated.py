"""Blocks drawn at random: paths, slices, edits, saves and stops, and now and then a hostile kind in place of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .kinds import Kind

__all__ = ["Generated", "generate"]

#: The demo model's decoder layers, and how often a block is hostile.
_LAYERS, _HOSTILE = 8, 0.1

_LOOPS = (
    "tracer.iter[:]",
    "tracer.iter[:]",
    "tracer.iter[:]",
    "tracer.iter[0:{n}]",
    "tracer.iter[{n}:]",
    "tracer.all()",
)

_SLICES = ("[-1]", "[0]", "[:, :8]", "[-1:, 3:70:2]", "[..., -5:]", "[:1]", "", "[-1, ::16]")

_READS = (
    "kept{i}.append({value}{cut}.clone())",
    "kept{i}.append(float({value}{cut}.float().mean()))",
    "kept{i}.append({value}{cut}.float().norm().item())",
    "kept{i}.append([step, tuple({value}{cut}.shape)])",
    "last{i} = {value}{cut}.clone().save()",
    "kept{i}.append(int({value}{cut}.float().flatten().argmax()))",
)

_EDITS = (
    "{value}{cut} *= {factor}",
    "{value}{cut} += {factor} - 1",
    "{value}[:] = {value} * {factor}",
    "{value}[-1] = {value}[-1].flip(-1)",
    "{value}[:, {k}] = 0",
)

_ENDS = (
    "if step == {n}: tracer.stop()",
    "if step == {n}: break",
    "if step == {n}: raise ValueError('drawn')",
    "if step >= {n}: continue",
)


@dataclass(frozen=True)
class Generated:
    """A block that was drawn. `kind` is the name of a hostile kind, `""` for a block of random parts."""

    seed: int
    source: str
    kind: str = ""


class _Drawn:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.lists = 0

    def location(self, layer: int) -> tuple[str, bool]:
        """A location of a layer, and whether its value is a tuple of two tensors."""
        path = f"model.model.layers[{layer}]"
        return self._draw.choice(
            [
                (f"{path}.output", True),
                (f"{path}.self_attn.output", False),
                (f"{path}.mlp.output", False),
                (f"model.residual({layer}).output", False),
            ]
        )

    def parts(self, layer: int) -> list[str]:
        """The lines that read one location of a layer, and do something with the value."""
        draw, (location, pair) = self._draw, self.location(layer)
        lines, value = [f"v = {location}"], "v[0]" if pair else "v"
        for _ in range(draw.randint(1, 3)):
            options = {
                "cut": draw.choice(_SLICES),
                "factor": draw.choice((0.5, 0.99, 1.01, 1.5)),
                "k": draw.randint(0, 255),
                "value": value,
                "i": self.lists,
            }
            if draw.random() < 0.6:
                lines.append(draw.choice(_READS).format(**options))
            else:
                lines.append(draw.choice(_EDITS).format(**options))
        if draw.random() < 0.2:
            replaced = f"(v[0] * {draw.choice((0.9, 1.1))}, v[1])" if pair else f"v * {draw.choice((0.9, 1.1))}"
            lines.append(f"{location} = {replaced}")
        self.lists += 1
        return lines

    def phases(self) -> list[str]:
        draw = self._draw
        lines = []
        if draw.random() < 0.3:
            lines.append("chosen.append(int(model.logits.argmax()))")
        if draw.random() < 0.2:
            lines.append(f"model.logits[:, :{draw.randint(1, 2000)}] = -1e9")
        if draw.random() < 0.2:
            lines.append("chosen.append(int(model.samples[0]))")
        if draw.random() < 0.1:
            lines.append(f"model.samples[:] = {draw.choice((7, 11, 4095, 4096, -1))}")
        return lines

    def source(self) -> str:
        draw = self._draw
        layers = sorted(draw.sample(range(_LAYERS), draw.randint(1, 3)), reverse=draw.random() < 0.05)
        body: list[str] = []
        if draw.random() < 0.3:
            body.append(draw.choice(_ENDS).format(n=draw.randint(0, 20)))
        for layer in layers:
            lines = self.parts(layer)
            if draw.random() < 0.2:
                lines = [f"if step % {draw.randint(2, 3)} == 0:", *("    " + line for line in lines)]
            body += lines
        body += self.phases()
        loop = draw.choice(_LOOPS).format(n=draw.randint(1, 12))
        heads = [f"kept{at} = [].save()" for at in range(self.lists)]
        return "\n".join([*heads, "chosen = [].save()", f"for step in {loop}:", *("    " + one for one in body)]) + "\n"


def generate(seed: int, hostile: list[Kind]) -> Generated:
    """The block of a seed; a tenth of all seeds have one of the `hostile` kinds."""
    draw = random.Random(seed)
    if hostile and draw.random() < _HOSTILE:
        kind = draw.choice(hostile)
        return Generated(seed, kind.source, kind.name)
    return Generated(seed, _Drawn(draw).source())
