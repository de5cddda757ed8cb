"""Each notebook of the cookbook runs on the session's real engine, and its checks hold."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import nbformat
import pytest

from tests.support import ROOT
from tests.support.checkpoints import make_checkpoint
from tests.support.cookbook import COOKBOOK, CUT, checks, executed, failed, notebooks, output_bytes, saved
from tests.support.engine_process import EngineProcess, running_engine
from tracewire_bus.transport.embedded import EmbeddedServer

#: Most bytes of a notebook's outputs: a few numbers, texts, and one or two small figures.
MOST_BYTES = 80_000


#: Other models than the demo's: of few layers, whose heads together are wider than the residual stream, or whose
#: positions are learned. Their weights are random, so they have learned nothing.
OTHERS = ("gemma3", "gpt2")
#: What comes out with any model, trained or not; the other notebooks look for what training brings about.
ALWAYS = {"fan", "thermostat"}
#: Those that train for a minute.
LONG = {"autoencoder"}


@pytest.fixture(params=notebooks(), ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    """A notebook of the cookbook."""
    return request.param


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Its cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(one, id=one.stem, marks=[pytest.mark.full] * (one.stem in LONG)) for one in notebooks()],
    indirect=True,
)
async def test_every_cell_runs_and_every_check_holds(path: Path, engine: EngineProcess, engine_bus: str) -> None:
    # A cell whose assertion fails raises.
    made = await executed(path, {"TRACEWIRE_URL": engine_bus, "TRACEWIRE_MODEL": "demo"})
    counts = [cell.execution_count for cell in code_cells(made)]
    assert counts == list(range(1, len(counts) + 1))
    assert output_bytes(made) < MOST_BYTES


@pytest.fixture(scope="module", params=OTHERS)
async def other(
    request: pytest.FixtureRequest, starts_engine: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, str]]:
    """The environment of notebooks on an engine of another model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = str(make_checkpoint(request.param, folder))
    options = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, folder, *options, model=model):
            yield {"TRACEWIRE_URL": server.url, "TRACEWIRE_MODEL": request.param}


@pytest.mark.full
async def test_every_cell_runs_on_another_model(path: Path, other: dict[str, str]) -> None:
    """A check that does not hold is a finding. Nothing else fails, and the cells behind it run."""
    made = await executed(path, other, findings=True)
    assert all(cell.execution_count for cell in code_cells(made))
    findings = failed(made)
    assert all(one.startswith("assert ") for one in findings), findings
    assert len(findings) < checks(made)
    assert not findings or path.stem not in ALWAYS


def test_it_states_checks_and_lets_no_cell_fail(path: Path) -> None:
    notebook = saved(path)
    assert checks(notebook) >= 2
    assert not any(CUT in cell.metadata.get("tags", []) for cell in notebook.cells)
    assert notebook.cells[0].cell_type == "markdown"
    first = code_cells(notebook)[0].source
    # A reader's own Redis and model take their place.
    assert 'os.environ.get("TRACEWIRE_URL", ' in first
    assert 'os.environ.get("TRACEWIRE_MODEL", ' in first


def test_it_is_saved_with_small_outputs_of_a_run_without_errors(path: Path) -> None:
    cells = code_cells(saved(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert output_bytes(saved(path)) < MOST_BYTES


def test_the_readme_lists_it(path: Path) -> None:
    assert f"({path.name})" in (COOKBOOK / "README.md").read_text()


def test_the_documentation_states_what_the_autoencoder_reaches() -> None:
    """docs/features.md has the figures of the notebook's saved run, and the bound that each run is held to."""
    cells = code_cells(saved(COOKBOOK / "autoencoder.ipynb"))
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    page = (ROOT / "docs" / "features.md").read_text()
    losses = re.findall(r"loss (0\.\d+)", printed)
    effects = re.findall(r"added: (0\.\d+)", printed)
    assert len(losses) == 2
    assert len(effects) == 3
    for figure in (*losses, effects[0], effects[-1]):
        assert figure in page
    bounds = re.findall(r"loss is not below (0\.\d+)", page)
    sources = "".join(cell.source for cell in cells)
    assert [f"STATED = {bound}\n" in sources for bound in bounds] == [True]
