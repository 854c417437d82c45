"""What all sections of a configuration share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from qie.paths import local_path
from qie.stores import scheme_of

LocalPath = Annotated[
    str, AfterValidator(lambda place: str(local_path(place))), WithJsonSchema({"type": "string", "format": "path"})
]
Place = Annotated[
    str,
    AfterValidator(lambda place: place if scheme_of(place) else str(local_path(place))),
    WithJsonSchema({"type": "string", "format": "path or URL"}),
]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def word(text: str) -> BeforeValidator:
    """For a value that YAML reads as false when it is not quoted: `no` and `off`."""
    return BeforeValidator(lambda value: text if value is False else value)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
