"""What all sections of a configuration share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from qie.errors import ConfigError, GoneError
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

# Every number has two ends: a slip of the keyboard is refused here, and not by what later runs out of memory, bits or
# patience.
MANY = 10**9
Count = Annotated[int, Field(gt=0, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
Bytes = Annotated[int, Field(gt=0, lt=1 << 63)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Beyond it, products in float32 or bfloat16 are 0 or infinite."""
Batch = Annotated[int, Field(gt=0, le=1024)]


def word(text: str) -> BeforeValidator:
    """For a value that YAML reads as false when it is not quoted: `no` and `off`."""
    return BeforeValidator(lambda value: text if value is False else value)


def legible(value: Any) -> Any:
    """A text, or a list of some, as files can hold it and the system takes it. Raises ValueError for others."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):
            raise ValueError("a text of Unicode, without NUL")
    return value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _legible(cls, value: Any) -> Any:
        return legible(value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from qie.config.moved import moved, within  # which knows all sections

        hint = "write it into the file, or qie.load_config(file, ['section.key=value'])"
        known_as = moved(within(type(self), name))
        raise ConfigError(
            "a configuration does not change once it is loaded",
            where=name,
            hint=f"{known_as}; {hint}" if known_as else hint,
        )

    if not TYPE_CHECKING:  # or every attribute would be one to mypy

        def __getattr__(self, name: str) -> Any:
            """For what is no field: old keys are answered with what to write instead."""
            if name.startswith("_"):  # what pydantic and Python ask for, even while sections are being made
                return super().__getattr__(name)
            from qie.config.moved import moved, within

            place = within(type(self), name)
            if answer := moved(place):
                raise GoneError(f"the configuration has no {place}", hint=answer)
            return super().__getattr__(name)
