"""Examples of answers have their forms, with no member that the form lacks."""

from __future__ import annotations

import jsonschema
import pytest

from tracewire.gateway.examples import EXAMPLES
from tracewire.gateway.schemas import components

SCHEMAS = components()


@pytest.mark.parametrize("form", EXAMPLES)
def test_an_example_has_its_form(form: str) -> None:
    closed = {
        name: {**one, "additionalProperties": False} if "properties" in one else one for name, one in SCHEMAS.items()
    }
    jsonschema.validate(EXAMPLES[form], {"$ref": f"#/components/schemas/{form}", "components": {"schemas": closed}})
