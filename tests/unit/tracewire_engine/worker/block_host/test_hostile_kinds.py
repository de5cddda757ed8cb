"""Every kind of hostile block in a host, beside innocent traces on a small model: theirs stay equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.isolation.table import KINDS
from tests.support.hosted_model import HostedModel, Outcome

READS = """
hidden = [].save()
for step in tracer.iter[:]:
    hidden.append(model.model.layers[2].output[0].clone())
"""

WRITES = """
hidden = [].save()
for step in tracer.iter[:]:
    o = model.model.layers[1].output
    model.model.layers[1].output = (o[0] * 1.5, o[1])
    hidden.append(model.model.layers[3].output[0].clone())
"""

#: Those that are tried in every run.
QUICK = (
    "samples-too-large-in-place",
    "storage-filled",
    "strided-write",
    "nan-rows",
    "os-exit",
    "segmentation-fault",
    "kill-parent",
    "fork-returns",
    "descriptors-closed",
    "module-call-patched",
    "builtins-patched",
    "environment-of-parents-read",
    "save-of-2gb-bytes",
    "weights-converted",
)

#: These slices change nothing of a model so narrow.
SAME_HERE = ("wrong-shape", "logits-other-width")


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "visits"])
def served(request: pytest.FixtureRequest) -> Iterator[HostedModel]:
    model = HostedModel(layers=5, step_s=4.0, visits=request.param)
    yield model
    model.close()


def batch(model: HostedModel, label: str, source: str) -> dict[str, Outcome]:
    sources = {"offender": source, "reads": READS, "writes": WRITES, "also reads": READS}
    blocks = {f"{label}.{name.replace(' ', '.')}": one for name, one in sources.items()}
    found = model.run(blocks, steps=6, hostile=[f"{label}.offender"])
    return dict(zip(sources, found.values(), strict=True))


@pytest.fixture(scope="module")
def control(served: HostedModel) -> dict[str, Outcome]:
    return batch(served, "control", READS)


def hidden(outcome: Outcome) -> list[Any]:
    assert outcome.finish is not None
    assert outcome.finish.error is None
    found: list[Any] = outcome.saves["hidden"]
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in KINDS]
)
def test_innocent_traces_are_equal_to_a_control(
    served: HostedModel, control: dict[str, Outcome], name: str, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("victim")
    source = KINDS[name].source.replace("{folder}", str(tmp_path)).replace("{port}", "6379")
    found = batch(served, name, source)
    assert found["offender"].finish is not None
    if KINDS[name].meets == "error" and name not in SAME_HERE:
        assert found["offender"].finish.error is not None
    for innocent in ("reads", "writes", "also reads"):
        pairs = zip(hidden(found[innocent]), hidden(control[innocent]), strict=True)
        assert all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)
    assert (tmp_path / "victim").read_text() == "victim"
