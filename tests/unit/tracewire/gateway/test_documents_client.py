"""A client that OpenAPI Generator makes of the API's document, against a gateway."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest

from tests.support.api_cases import documented
from tests.support.until import until

PACKAGE = "generated_client"


def generate(url: str, folder: Path) -> None:
    """Write the client's package into a folder."""
    document = folder / "openapi.json"
    # The gateway makes the document now, which on a busy machine takes longer than httpx waits by default.
    document.write_bytes(httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().content)
    generator = str(Path(sys.executable).with_name("openapi-generator-cli"))
    command = [generator, "generate", "-g", "python", "-i", str(document), "-o", str(folder)]
    names = f"--additional-properties=packageName={PACKAGE}"
    subprocess.run([*command, names], check=True, capture_output=True, timeout=300)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Generates the client and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(url: str) -> Any:
        generate(url, tmp_path)
        return importlib.import_module(PACKAGE)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def converse(client: Any, url: str) -> None:
    """Submit a trace, read it, steer it, cancel it."""
    with client.ApiClient(client.Configuration(host=url)) as connected:
        traces, models = client.TracesApi(connected), client.OpenaiApi(connected)
        assert [card.id for card in models.list_models().data] == ["demo"]
        ablate = client.Ablate(do="ablate", at="residual(2)", keep=client.AblateKeep(client.Live(live="alpha")))
        submitted = traces.submit_trace(
            client.TraceBody(
                model="demo",
                prompt=client.TracePrompt("hang on"),
                live={"alpha": 1.0},
                interventions=[client.Intervention(ablate)],
                trace_id="asked",
            )
        )
        assert isinstance(submitted, client.SubmittedTrace)
        assert (submitted.id, submitted.links["events"]) == ("asked", "/traces/asked/events")
        steered = traces.steer_trace("asked", client.SteerBody(values={"alpha": 8.0}))
        assert (type(steered), steered.version) == (client.NewVersion, 1)
        described = traces.get_trace("asked")
        assert isinstance(described, client.TraceDescription)
        assert (described.status, described.live.values) == (None, {"alpha": 8.0})
        assert [one.id for one in traces.list_traces(state=["running"]).data] in ([], ["asked"])
        with pytest.raises(client.exceptions.UnprocessableEntityException) as refused:
            traces.steer_trace("asked", client.SteerBody(values={"alpha": "much"}))
        assert refused.value.data.var_field.startswith("live")
        # A trace that is cancelled before an engine has begun it has no choices.
        while not traces.get_trace_state("asked").invokes:
            pass
        cancelled = traces.cancel_trace("asked", client.ControlBody(by="me", reason="enough"))
        assert (type(cancelled), cancelled.cancelled) == (client.CancelledTrace, True)
        with pytest.raises(client.exceptions.NotFoundException) as missing:
            traces.get_trace("nowhere")
        assert isinstance(missing.value.data, client.Problem)
        assert (missing.value.data.type, missing.value.data.trace_id) == ("urn:tracewire:unknown_trace", "nowhere")


def read_ended(client: Any, url: str) -> None:
    """Read the trace, which has ended."""
    with client.ApiClient(client.Configuration(host=url)) as connected:
        state = client.TracesApi(connected).get_trace_state("asked")
        assert isinstance(state, client.TraceState)
        assert (state.status, state.error.by, state.error.reason) == ("cancelled", "anonymous/me", "enough")
        assert isinstance(state.invokes[0][0], client.TraceChoiceState)
        whole = client.OpenaiApi(connected).create_completion(
            client.CompletionBody(model="demo", prompt=client.Prompt("x"), max_tokens=2)
        )
        assert isinstance(whole, client.Completion)
        assert whole.usage.completion_tokens == 2


async def test_a_generated_client_submits_reads_steers_and_cancels(redis_url: str, prefix: str, made: Any) -> None:
    async with documented(redis_url, prefix) as served:
        client = await anyio.to_thread.run_sync(made, served.url)
        await anyio.to_thread.run_sync(converse, client, served.url)

        async def ended() -> bool:
            return (await served.gateway.client.get_state("asked")).finished

        await until(ended)
        await anyio.to_thread.run_sync(read_ended, client, served.url)
