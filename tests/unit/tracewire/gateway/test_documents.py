"""What the OpenAPI document says, and that its examples are requests and answers of the gateway."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from tests.support.api_cases import TRACE, documented
from tracewire.gateway.app import create_app
from tracewire.gateway.documents import COMMON, OPENAI_COMMON, answers, files, problems, stream
from tracewire.gateway.downloads import FORMATS
from tracewire.gateway.problems import Problem
from tracewire.gateway.settings import Settings
from tracewire_bus.wire.messages import Declared

DOCUMENT: dict[str, Any] = create_app(Settings()).openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The path, method and description of each route."""
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def example(schema: dict[str, Any]) -> Any:
    """The example of a schema, or of the one that it refers to."""
    for one in (schema, *schema.get("anyOf", ())):
        name = one.get("$ref", "").rpartition("/")[2]
        if name:
            return SCHEMAS[name]["examples"][0]
    return schema["examples"][0]


def check(value: Any, schema: dict[str, Any], *, closed: bool = False) -> None:
    """Check a value against a schema of the document. With `closed`, every member must be described."""
    components = SCHEMAS
    if closed:
        components = {
            name: {**one, "additionalProperties": False} if "properties" in one else one
            for name, one in SCHEMAS.items()
        }
    jsonschema.validate(value, {**schema, "components": {"schemas": components}})


def test_the_documented_errors_have_the_fields_of_those_that_are_sent() -> None:
    sent = Problem(404, "none", code="unknown_trace", field="trace_id")
    check(sent.details(), {"$ref": "#/components/schemas/Problem"}, closed=True)
    check(sent.openai(), {"$ref": "#/components/schemas/OpenAIError"}, closed=True)


def test_each_route_documents_the_status_of_a_request_that_is_wrong() -> None:
    assert {401, 403, 413, 422, 429, 503} <= set(COMMON)
    assert {400, 401, 403, 413, 429, 503} <= set(OPENAI_COMMON)
    for path, _, operation in operations():
        assert ("400" if path.startswith("/v1/") else "422") in operation["responses"], path
        assert path.startswith("/v1/") != ("422" in operation["responses"])
        assert "default" not in operation["responses"]


def test_an_answer_refers_to_its_form() -> None:
    found = answers("Done.", "NewVersion", 202) | problems(404)
    assert found[202]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/NewVersion"}
    assert set(found) == {202, 404}
    assert set(problems(404, openai=True)[404]["content"]) == {"application/json"}


def test_a_stream_may_have_another_form() -> None:
    assert set(stream("Events.", "data: {}\n\n")[200]["content"]) == {"text/event-stream"}
    both = stream("Events.", "data: {}\n\n", answers("Whole.", "NewVersion"))
    assert list(both[200]["content"]) == ["application/json", "text/event-stream"]


def test_an_array_is_documented_in_each_of_its_formats() -> None:
    assert set(files()[200]["content"]) == set(FORMATS.values())


def test_routes_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "__" in name or name.endswith(("_get", "_post", "_put", "_delete"))]
    assert {tag for _, _, operation in operations() for tag in operation["tags"]} == {
        "edits",
        "engines",
        "library",
        "openai",
        "operations",
        "traces",
    }


def test_interventions_are_told_apart_by_what_they_do() -> None:
    found = SCHEMAS["Intervention"]
    assert found["discriminator"]["propertyName"] == "do"
    assert len(found["oneOf"]) == len(found["discriminator"]["mapping"]) == len(typing.get_args(Declared))
    for body in ("TraceBody", "Extension", "EditBody"):
        assert SCHEMAS[body]["properties"]["interventions"]["items"] == {"$ref": "#/components/schemas/Intervention"}


def test_the_examples_of_answers_have_their_forms() -> None:
    count = 0
    for path, method, operation in operations():
        for status, answer in operation["responses"].items():
            for media, content in answer.get("content", {}).items():
                if media == "application/json" and status < "300":
                    check(example(content["schema"]), content["schema"], closed=True)
                    count += 1
        assert "200" in operation["responses"] or "202" in operation["responses"] or method == "delete", path
    assert count > 15


# --- requests ---------------------------------------------------------------------------------------------------------


def request_of(path: str, operation: dict[str, Any], file: bytes) -> tuple[str, dict[str, Any]]:
    """The path of a route's example, and its body: JSON, or this file."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", example(parameter["schema"]))
    body = operation.get("requestBody")
    if body is None:
        return path, {}
    if list(body["content"]) == ["application/octet-stream"]:
        return path, {"content": file}
    return path, {"json": example(body["content"]["application/json"]["schema"])}


#: Routes that act on a trace that runs.
CONTROL = ("steer_trace", "pause_trace", "resume_trace", "cancel_trace")


async def test_each_example_is_a_request_with_a_documented_success(redis_url: str, prefix: str, tmp_path: Path) -> None:
    count = 0
    everything = [one for one in operations() if one[2]["operationId"] not in CONTROL]
    # An edit is installed first and removed last.
    async with documented(redis_url, prefix) as served, served.http() as http:
        (await served.gateway.client.record(TRACE)).save(tmp_path / "mine.twrec")
        file = (tmp_path / "mine.twrec").read_bytes()
        for path, method, operation in sorted(everything, key=lambda one: (one[1] == "delete", one[1] != "put")):
            where, body = request_of(path, operation, file)
            async with http.stream(method.upper(), where, **body) as answer:
                described = operation["responses"].get(str(answer.status_code))
                assert answer.is_success, (operation["operationId"], (await answer.aread()).decode())
                assert described is not None, (operation["operationId"], answer.status_code)
                media = answer.headers.get("Content-Type", "").partition(";")[0]
                assert media in described.get("content", {"": None}), operation["operationId"]
                if media == "application/json":
                    await answer.aread()
                    check(answer.json(), described["content"][media]["schema"], closed=True)
            count += 1
    assert count == len(everything)
