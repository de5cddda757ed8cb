"""Activations of a data set's prompts, as files that the field's tools read.

`client.harvest(model, prompts, interventions, to=...)` writes them and `open(to)` reads them. A harvest is a folder, or
any place that fsspec has a URL for:

    harvest.json             what was harvested: the model, the interventions, the options
    journal/000000.json      one entry a shard, put in one piece when the shard's files are whole
    shards/000000-ID.*       `.safetensors` (or none), `.index.parquet` and `.prompts.parquet`

A file belongs to the harvest only if an entry of the journal lists it. docs/harvest.md describes the files.
"""

from __future__ import annotations

from .reading import Harvested, HarvestedPrompt, open

__all__ = ["Harvested", "HarvestedPrompt", "open"]
