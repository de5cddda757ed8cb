"""A trace and its events, as a client holds them."""
