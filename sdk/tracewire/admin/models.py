"""The models that engines serve, as `client.models`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from tracewire.checks import Duration, check_limit, check_text
from tracewire.error_mapping import bus_errors
from tracewire.traces.model import Model

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.served_models import ModelInfo
    from tracewire.traces.session import Session

__all__ = ["Models"]


class Models:
    """The models that running engines serve. Available as `Client.models`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self) -> Listing[ModelInfo]:
        """The served models."""

        async def pages() -> AsyncIterator[Sequence[ModelInfo]]:
            yield await self._session.models.infos()

        return Listing(pages)

    async def get(self, name: str, *, timeout: Duration | None = 0.0) -> Model:
        """A model's handle, with its module tree.

        The call waits for up to `timeout` seconds for an engine that serves the model: by default not at all, with
        `None` without limit.

        Raises:
            UnknownModel: no live engine serves a model of this name. The error names the models that are served.
            ValueError: `timeout` is negative.
        """
        check_text("name", name)
        served = await self._session.models.find(name, check_limit("timeout", timeout), age=0)
        return Model(served.info, served.trees, self._session)

    async def waiting(self, name: str) -> int:
        """How many submissions wait for a model, whether engines serve it or not.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        with bus_errors():
            return await self._session.open_bus().queue.waiting(check_text("name", name))

    async def oldest(self, name: str) -> float:
        """For how many seconds the longest-waiting of the clients' next submissions for a model has waited.

        0 if no submission waits.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        with bus_errors():
            return await self._session.open_bus().queue.oldest_s(check_text("name", name))

    def __repr__(self) -> str:
        return "<Models>"
