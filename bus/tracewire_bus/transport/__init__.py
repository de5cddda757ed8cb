"""Connections to Redis: one server, Sentinel, Cluster, or an embedded server."""
