"""Names that the adapter and the workers agree on, apart from both so that neither imports the other's libraries."""

from __future__ import annotations

__all__ = ["BLOCK_ARG", "BLOCK_TIMEOUT", "CHECK_COLLECT", "DECLARED_ARG", "LINK_ADDRESS", "LIVE_ARG"]

#: Keys of a request's `SamplingParams.extra_args`: an encoded `Block`, its encoded declared interventions (a list of
#: `Placed`), and their packed live parameters.
BLOCK_ARG = "tracewire_block"
DECLARED_ARG = "tracewire_declared"
LIVE_ARG = "tracewire_live"

#: Key of vLLM's `additional_config` under which the workers find the adapter's address.
LINK_ADDRESS = "tracewire_link"

#: Key of `additional_config`: take the digests in a final's manifest from what nnsight's own collect returns.
CHECK_COLLECT = "tracewire_check_collect"

#: Key of `additional_config`: how long one turn of a block may take, in seconds.
BLOCK_TIMEOUT = "tracewire_block_timeout"
