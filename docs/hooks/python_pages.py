"""The pages of the Python API: every public name of `tracewire` on one of them, by the module that defines it."""

from __future__ import annotations

import ast
from pathlib import Path

import tracewire
import tracewire.blocking
import tracewire.harvest

__all__ = ["pages"]

#: Each page's title, its first sentences, and which modules' names it has. A name of no module here is on "More".
_PAGES = {
    "client": (
        "The client",
        "A client connects to one Redis and starts, follows and changes traces there.",
        ("tracewire.client", "tracewire.options", "tracewire.submission", "tracewire.checks"),
    ),
    "traces": (
        "Traces",
        "Handles of a model, of a trace of this client, and of any other trace; and what a trace comes to.",
        (
            "tracewire.traces.model",
            "tracewire.traces.trace",
            "tracewire.traces.subscription",
            "tracewire.traces.tracer",
            "tracewire.traces.state",
            "tracewire.traces.recorder.recording",
            "tracewire.traces.recorder.replaying",
            "tracewire.traces.recorder.comparing",
            "tracewire.traces.recorder.fan",
            "tracewire.traces.served_models",
        ),
    ),
    "events": (
        "Events",
        "What iterating over a trace or a subscription yields. `event.type` tells the events apart.",
        ("tracewire.traces.output",),
    ),
    "interventions": (
        "Interventions",
        "Blocks, and the declared interventions that need no code.",
        (
            "tracewire.capture.intervention",
            "tracewire_bus.wire.messages",
            "tracewire_bus.wire.declared_base",
            "tracewire_bus.wire.patch_kinds",
            "tracewire_bus.wire.lens_kinds",
            "tracewire_bus.wire.feature_kinds",
            "tracewire_bus.wire.steering_kinds",
            "tracewire_bus.domain.autoencoders",
        ),
    ),
    "resources": ("Engines, models and edits", "What `client.models`, `client.engines` and the like have.", ()),
    "values": (
        "Values",
        "Saved values: how large arrays are loaded, converted and compared.",
        (
            "tracewire.traces.values",
            "tracewire.traces.large",
            "tracewire_bus.wire.refs",
            "tracewire_bus.wire.digests",
            "tracewire_bus.domain.fold",
        ),
    ),
    "errors": (
        "Exceptions",
        "Every exception. [Errors](../../errors.md) has the message of each, and what to do.",
        ("tracewire.errors", "tracewire.traces.failures"),
    ),
}
_REST = "resources"
#: Where names stand whose module has names of several pages.
_HOMES = {
    **dict.fromkeys(("ChatMessage", "FirstToken", "MessageDelta", "Status", "ToolCall", "ToolCallDelta"), "events"),
    "ModelInfo": "resources",
}
#: What mkdocstrings does on some pages otherwise than mkdocs.yml says.
_OPTIONS = {
    "client": {"inherited_members": True, "show_if_no_docstring": True},
    "interventions": {"show_if_no_docstring": True},
    # Callers make none of these themselves.
    "traces": {"inherited_members": True, "merge_init_into_class": False, "show_bases": False},
    "errors": {"merge_init_into_class": False},
    "resources": {"merge_init_into_class": False, "show_bases": False},
}


def pages() -> dict[str, str]:
    """The pages, by their paths on the site."""
    names: dict[str, list[str]] = {page: [] for page in _PAGES}
    homes = {module: page for page, (_, _, modules) in _PAGES.items() for module in modules}
    order = list(homes)
    imported = [(name, module) for name, module in _imported() if name in tracewire.__all__]

    def rank(one: tuple[str, str]) -> tuple[int, bool]:
        """By module; in each, functions come before classes."""
        name, module = one
        return order.index(module) if module in homes else len(order), name[0].isupper()

    for name, module in sorted(imported, key=rank):
        names[_HOMES.get(name) or homes.get(module, _REST)].append(f"tracewire.{name}")
    found = {page: _page(title, text, names[page], _OPTIONS.get(page, {})) for page, (title, text, _) in _PAGES.items()}
    found["blocking"] = _page(
        "The blocking client",
        "The same client for scripts and threads ([both forms](../../conventions.md)).",
        [f"tracewire.blocking.{name}" for name in tracewire.blocking.__all__],
        {},
    )
    found["harvest"] = _page(
        "Harvests",
        "Reading a harvest's files. `Client.harvest` makes them ([harvests](../../harvest.md)).",
        [f"tracewire.harvest.{name}" for name in tracewire.harvest.__all__],
        {},
    )
    return {f"reference/python/{page}.md": text for page, text in found.items()}


def _page(title: str, text: str, names: list[str], options: dict[str, bool]) -> str:
    lines = [f"\n      {name}: {str(value).lower()}" for name, value in options.items()]
    chosen = "".join(["\n    options:", *lines]) if lines else ""
    return "\n\n".join([f"# {title}", text, *(f"::: {name}{chosen}" for name in names)]) + "\n"


def _imported() -> list[tuple[str, str]]:
    """The names that `tracewire` imports, in order, each with its module. The classes themselves say `tracewire`."""
    assert tracewire.__file__ is not None
    nodes = ast.parse(Path(tracewire.__file__).read_text()).body
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = f"tracewire.{node.module}" if node.level else node.module
            found += [(alias.name, module) for alias in node.names]
    return found
