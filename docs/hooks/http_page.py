"""The page of the HTTP API, from the OpenAPI document of `tracewire gateway`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tracewire.gateway.app import create_app
from tracewire.gateway.settings import Settings

HEAD = """# HTTP API

The routes of `tracewire gateway`, generated from its OpenAPI document. A running gateway answers with that document at
`/openapi.json`. [The gateway](../gateway.md) explains keys, OpenAI's API, streams, errors and the WebSocket
`/traces/{id}/ws`, which OpenAPI cannot describe.
"""
_TITLES = {"openai": "OpenAI's API", "traces": "Traces", "engines": "Engines, edits and events"}
_REF = "#/components/schemas/"

_Schema = dict[str, Any]


def page() -> str:
    """The page's text."""
    return of_document(create_app(Settings()).openapi())


def of_document(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    schemas = document["components"]["schemas"]
    parts = [HEAD]
    for tag, operations in _by_tag(document["paths"]).items():
        parts.append(f"## {_TITLES.get(tag, tag.capitalize())}\n")
        parts += [_operation(method, path, operation, schemas) for method, path, operation in operations]
    parts.append(_error_table(document["paths"]))
    parts.append("## Bodies\n")
    for name, schema in sorted(schemas.items()):
        parts.append(f"### {name} {{ #{name.lower()} }}\n\n{_described(schema)}{_fields(schema)}")
    return "\n".join(parts)


def _by_tag(paths: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, item in paths.items():
        for method, operation in item.items():
            found.setdefault((operation.get("tags") or ["operations"])[0], []).append((method, path, operation))
    return found


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, _Schema]) -> str:
    anchor = re.sub(r"\W+", "-", f"{method}{path}").strip("-").lower()
    parts = [f"### {method.upper()} `{path}` {{ #{anchor} }}\n", operation.get("description", ""), ""]
    rows = [_parameter(one) for one in operation.get("parameters", ())]
    if rows:
        parts += ["| parameter | in | type | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        parts += [f"Body: {', '.join(_type(one.get('schema', {})) for one in body.values())}.", ""]
    parts += ["| status | answer | form |", "| --- | --- | --- |"]
    responses = sorted(operation["responses"].items())
    parts += [_answer(status, answer) for status, answer in responses if not _is_error(status)]
    parts += ["", _errors(responses), "", *_examples(operation["responses"], schemas)]
    return "\n".join(parts)


def _is_error(status: str) -> bool:
    return not status.startswith(("2", "3"))


def _errors(responses: list[tuple[str, dict[str, Any]]]) -> str:
    """A line with the statuses of errors, whose meanings stand at the page's end, and their forms."""
    errors = [(status, answer) for status, answer in responses if _is_error(status)]
    forms = dict.fromkeys(
        _type(content["schema"])
        for _, answer in errors
        for content in answer.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    )
    statuses = ", ".join(status for status, _ in errors)
    return f"[Errors](#errors): {statuses}{', as ' * bool(forms)}{' or '.join(forms)}."


def _error_table(paths: dict[str, Any]) -> str:
    """What the statuses of errors mean."""
    found: dict[str, dict[str, None]] = {}
    for item in paths.values():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                if _is_error(status):
                    found.setdefault(status, {})[answer.get("description", "")] = None
    rows = [f"| {status} | {_cell(' Or: '.join(texts))} |" for status, texts in sorted(found.items())]
    return "\n".join(["## Errors\n", "| status | meaning |", "| --- | --- |", *rows, ""])


def _parameter(one: dict[str, Any]) -> str:
    needed = " (required)" if one.get("required") and one["in"] != "path" else ""
    text = _cell(one.get("description", "") + needed)
    return f"| `{one['name']}` | {one['in']} | {_type(one.get('schema', {}))} | {text} |"


def _answer(status: str, answer: dict[str, Any]) -> str:
    forms = [f"`{media}`{_form(one.get('schema', {}))}" for media, one in answer.get("content", {}).items()]
    return f"| {status} | {_cell(answer.get('description', ''))} | {', '.join(forms)} |"


def _form(schema: _Schema) -> str:
    return f": {_type(schema)}" if "$ref" in schema else ""


def _examples(responses: dict[str, Any], schemas: dict[str, _Schema]) -> Iterator[str]:
    """What the answers of an operation that succeeded look like."""
    for status, answer in responses.items():
        if not status.startswith("2"):
            continue
        for media, content in answer.get("content", {}).items():
            example = content.get("example")
            if example is None and "$ref" in content.get("schema", {}):
                named = schemas[content["schema"]["$ref"].removeprefix(_REF)]
                example = next(iter(named.get("examples", ())), None)
            if example is not None:
                is_text = isinstance(example, str)
                text = example.rstrip() if is_text else json.dumps(example, indent=2, ensure_ascii=False)
                yield f'```{"text" if is_text else "json"} title="{status} {media}"\n{text}\n```\n'


def _described(schema: _Schema) -> str:
    return f"{' '.join(schema['description'].split())}\n\n" if schema.get("description") else ""


def _fields(schema: _Schema) -> str:
    """The fields of an object, or what else a schema is."""
    if not schema.get("properties"):
        return f"{_type({key: value for key, value in schema.items() if key != 'title'})}\n"
    needed = set(schema.get("required", ()))
    columns: dict[str, list[str]] = {"field": [], "type": [], "meaning": [], "default": []}
    for name, one in schema["properties"].items():
        columns["field"].append(f"`{name}`" + (" (required)" if name in needed else ""))
        columns["type"].append(_type(one))
        columns["meaning"].append(_cell(one.get("description", "")))
        columns["default"].append(f"`{json.dumps(one['default'])}`" if one.get("default") not in (None, "") else "")
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    rows = [[*filled], ["---"] * len(filled), *zip(*filled.values(), strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _type(schema: _Schema) -> str:
    """The type of a value in words, with links to the bodies that have names."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{name.lower()})"
    choices = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if key in schema), None)
    if choices is not None:
        return " or ".join(dict.fromkeys(_type(one) for one in choices))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"array of {_type(schema['items'])}" if schema.get("items") else "array"
    bounds = [
        f"{word} {schema[key]:g}" for key, word in (("minimum", "at least"), ("maximum", "at most")) if key in schema
    ]
    return " ".join([kind or "any", ", ".join(bounds)]).strip()


def _cell(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", " ".join(text.split()))
