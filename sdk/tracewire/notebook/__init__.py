"""Traces in notebooks: live views, and the static renderings that stay in a saved notebook.

The live view needs the extra `tracewire[notebook]`. Traces and subscriptions find this package by name, when a notebook
shows them.
"""
