"""What all sections of a configuration share."""

from __future__ import annotations

from typing import Annotated, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from qie.errors import ConfigError
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

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from qie.config.moved import moved  # which knows all sections

        hint = "write it into the file, or qie.load_config(file, ['section.key=value'])"
        known_as = moved(name)
        raise ConfigError(
            "a configuration does not change once it is loaded",
            where=name,
            hint=f"{known_as}; {hint}" if known_as else hint,
        )
