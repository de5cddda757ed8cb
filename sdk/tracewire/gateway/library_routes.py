"""The library over HTTP: vectors, probes and autoencoders under names, which interventions of requests use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from tracewire import InvalidEntry, LibraryEntry, UnknownEntry
from tracewire.traces.library_names import EntryName, parsed
from tracewire_bus.store.library import is_space

from .bodies import EntryBody
from .documents import EntryId, answers, problems
from .guarded_routes import GuardedRoute
from .json_values import to_json, value_of
from .keys import Caller
from .problems import Problem
from .state import Gateway, TheCaller, TheGateway, needs
from .trace_routes import IfMatch, matching, version_of

__all__ = ["router"]

router = APIRouter(prefix="/library", tags=["library"], route_class=GuardedRoute)

Tenant = Annotated[str, Query(description="the tenant whose entries are listed besides the shared ones")]
ArrayForm = Annotated[
    Literal["none", "list", "base64"],
    Query(description="how arrays stand in the answer; `none` leaves them out"),
]


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _said(entry: LibraryEntry) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(entry)
    return {name: to_json(value, "list", "") for name, value in found.items()}


def _name(text: str) -> EntryName:
    asked = parsed(text)
    if asked is None:
        raise InvalidEntry(text, "name", f"expected a name as 'calm', 'calm@3' or 'red:calm', got {text[:100]!r}")
    return asked


async def _visible(gateway: Gateway, caller: Caller, text: str) -> EntryName:
    """The entry of a name as a caller's traces find it: among the tenant's own first, then among the shared ones.

    Raises:
        UnknownEntry: there is none, or it is another tenant's.
    """
    asked = _name(text)
    if asked.space:
        if caller.tenant and asked.space != caller.tenant:
            raise UnknownEntry(text)
        return asked
    if not caller.tenant:
        return asked
    own = asked._replace(space=caller.tenant)
    versions = [one.version async for one in gateway.client.library.history(str(own))]
    return own if asked.version in versions or (asked.version is None and versions) else asked


def _own(caller: Caller, text: str) -> EntryName:
    """The name under which a caller puts or removes an entry.

    Raises:
        Problem: the key may not change entries there.
        UnknownEntry: the space is another tenant's.
    """
    asked = _name(text)
    if caller.tenant:
        if asked.space not in ("", caller.tenant):
            raise UnknownEntry(text)
        caller.require("submit")
        return asked._replace(space=caller.tenant)
    # What is shared, or a tenant's, changes what other clients' traces do.
    caller.require("operate")
    return asked


@router.get(
    "",
    operation_id="list_library",
    dependencies=[needs("read")],
    responses=answers("The entries.", "LibraryList"),
)
async def list_library(gateway: TheGateway, caller: TheCaller, tenant: Tenant = "") -> Response:
    """List the library: the versions of the key's tenant, then the shared ones. A key without a tenant may name one."""
    space = tenant or caller.tenant
    if not is_space(space) or (caller.tenant and space != caller.tenant):
        raise Problem(422, "expected the tenant of the key", code="invalid_request", field="tenant")
    with gateway.patience():
        entries = await gateway.client.library.list(space)
    return _json({"data": [_said(entry) for entry in entries]})


@router.get(
    "/{name}",
    operation_id="get_library_entry",
    dependencies=[needs("read")],
    responses=answers("The entry.", "LibraryEntry") | problems(404),
)
async def get_entry(name: EntryId, gateway: TheGateway, caller: TheCaller, arrays: ArrayForm = "none") -> Response:
    """Describe an entry, with its arrays if they are asked for. The `ETag` is its version."""
    library = gateway.client.library
    with gateway.patience():
        entry = await library.get(str(await _visible(gateway, caller, name)))
        said = _said(entry)
        if arrays != "none":
            loaded = await library.load(entry.id)
            said["arrays"] = {key: to_json(array, arrays, "") for key, array in loaded.items()}
    return _json(said, ETag=f'"{entry.version}"')


@router.get(
    "/{name}/history",
    operation_id="get_library_history",
    dependencies=[needs("read")],
    responses=answers("The versions.", "LibraryList"),
)
async def get_history(name: EntryId, gateway: TheGateway, caller: TheCaller) -> Response:
    """List all versions of a name, the newest first, with the removed ones."""
    with gateway.patience():
        asked = await _visible(gateway, caller, name)
        entries = await gateway.client.library.history(str(asked._replace(version=None)))
    return _json({"data": [_said(entry) for entry in entries]})


@router.put(
    "/{name}",
    operation_id="put_library_entry",
    dependencies=[needs("read")],
    responses=answers("The entry that was put.", "LibraryEntry") | problems(400, 404, 409, 412),
)
async def put_entry(
    name: EntryId, body: EntryBody, gateway: TheGateway, caller: TheCaller, if_match: IfMatch = None
) -> Response:
    """Put the next version of an entry. `If-Match` is the version that must be the newest, `"0"` for none.

    A tenant's key needs the right `submit`, and puts entries of its tenant. Another key needs `operate`.
    """
    asked = _own(caller, name)
    given = body.model_dump(exclude={"arrays"}, exclude_unset=True)
    wanted = version_of(if_match)
    with matching(wanted), gateway.patience():
        entry = await gateway.client.library.put(str(asked), _arrays(body.arrays), **given, replacing=wanted)
    return _json(_said(entry), ETag=f'"{entry.version}"')


def _arrays(given: Any) -> Any:
    """The arrays of a body: one, or several by name or by layer."""
    arrays = value_of(given, "arrays")
    if not isinstance(arrays, dict):
        return arrays
    return {int(key) if key.isdecimal() and len(key) < 6 else key: array for key, array in arrays.items()}


@router.delete(
    "/{name}",
    operation_id="remove_library_entry",
    dependencies=[needs("read")],
    responses=answers("The versions that were removed.", "RemovedEntries") | problems(404),
)
async def remove_entry(name: EntryId, gateway: TheGateway, caller: TheCaller) -> Response:
    """Remove one version (`calm@3`), or all versions of a name. Running traces keep what they began with."""
    asked = _own(caller, name)
    with gateway.patience():
        removed = await gateway.client.library.remove(str(asked))
    return _json({"removed": [*removed]})
