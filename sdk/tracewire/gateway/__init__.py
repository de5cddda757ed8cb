"""The gateway: Tracewire over HTTP. `tracewire gateway` serves it; see docs/internals/gateway.md.

The package needs the extra `tracewire[gateway]`. Nothing of the SDK imports it but the command, when it runs.
"""
