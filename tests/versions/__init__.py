"""Tests on each version of vLLM that the package claims: `python -m tests.versions`."""
