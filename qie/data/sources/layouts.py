"""How people lay out their data: the names of columns or folders, and what other tools' presets stand for.

A preset is nothing but such names. None of them changes a row's content, so none changes its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from qie.errors import SourceError


@dataclass(frozen=True)
class Names:
    """What the parts of a row are called: columns of a table, or folders in a folder. None is qie's own names.

    Attributes:
        target: the image to be learnt.
        controls: the images to edit, in order; () for none, which is text-to-image.
        prompt: the instruction; a column may hold a list of captions, the prompt first.
        mask: the mask.
        rejected: an image that is liked less than the target.
        name: what the owner calls the row; columns only.
        numbered: `controls` is one name, which may be followed by _0, _1 …
    """

    target: str | None = None
    controls: tuple[str, ...] | None = None
    prompt: str | None = None
    mask: str | None = None
    rejected: str | None = None
    name: str | None = None
    numbered: bool = False

    @classmethod
    def of(cls, given: Names | Mapping[str, object] | None) -> Names:
        """Names as they may be written. Raises SourceError for another role, or for a name that is no text."""
        if isinstance(given, Names):
            return given
        roles = [role.name for role in fields(cls) if role.name != "numbered"]
        values = dict(given or {})
        values = {role: name for role, name in values.items() if name is not None}
        if unknown := [role for role in values if role not in roles]:
            raise SourceError(
                "a role of columns is unknown", expected=", ".join(roles), found=", ".join(map(str, unknown))
            )
        controls = values.get("controls")
        if isinstance(controls, str):
            controls = [controls]
        if controls is not None:
            values["controls"] = tuple(controls) if isinstance(controls, Sequence) else (controls,)
        flat = [*(values[role] for role in values if role != "controls"), *(values.get("controls") or ())]  # type: ignore[misc]
        for name in flat:
            if name is not None and (not isinstance(name, str) or not name):
                raise SourceError("the name of a column is not text", expected="{target: edited}", found=repr(name))
        return cls(**values)  # type: ignore[arg-type]

    def over(self, base: Names) -> Names:
        """These names, and those of `base` where these say nothing."""
        given = {role.name: getattr(self, role.name) for role in fields(self) if role.name != "numbered"}
        merged = replace(base, **{role: name for role, name in given.items() if name is not None})
        return replace(merged, numbered=base.numbered and self.controls is None)

    def given(self) -> dict[str, str]:
        """The role of each name, in words."""
        roles = {
            "target": "target image",
            "prompt": "prompt",
            "mask": "mask",
            "rejected": "rejected target",
            "name": "name",
        }
        found = {name: words for role, words in roles.items() if (name := getattr(self, role)) is not None}
        return found | dict.fromkeys(self.controls or (), "control image")


@dataclass(frozen=True)
class Preset:
    """How one tool or dataset names things.

    Attributes:
        title: its name in prose.
        columns: of tables; None if it has none.
        folders: whether it is a layout of folders.
    """

    title: str
    columns: Names | None = None
    folders: bool = False

    def fits(self, columns: Collection[str]) -> bool:
        """Whether a table's columns are this preset's: its target, controls and prompt."""
        names, known = self.columns, {column.strip().lower() for column in columns}
        if names is None:
            return False
        controls = names.controls or ()
        found = all(name in known or (names.numbered and f"{name}_0" in known) for name in controls)
        return names.target in known and names.prompt in known and found


PRESETS: dict[str, Preset] = {
    "musubi": Preset("musubi-tuner", Names("image_path", ("control_path",), "caption", numbered=True), folders=True),
    "ai_toolkit": Preset("ai-toolkit", folders=True),
    "kohya": Preset("kohya's sd-scripts", folders=True),
    "instruct_pix2pix": Preset("InstructPix2Pix", Names("edited_image", ("original_image",), "edit_prompt")),
    "magicbrush": Preset("MagicBrush", Names("target_img", ("source_img",), "instruction", "mask_img")),
    "omniedit": Preset("OmniEdit", Names("edited_img", ("src_img",), "edited_prompt_list")),
}


@dataclass(frozen=True)
class Layout:
    """How a source is read.

    Attributes:
        names: of columns or folders.
        preset: a key of PRESETS.
        root: the folder or URL that relative paths in a table begin at, and in which absolute ones may lie; None for
            the table's folder.
        text_to_image: a row may have no control.
    """

    names: Names = field(default_factory=Names)
    preset: str | None = None
    root: str | None = None
    text_to_image: bool = False

    @classmethod
    def of(
        cls,
        preset: str | None = None,
        columns: Names | Mapping[str, object] | None = None,
        root: str | None = None,
        *,
        text_to_image: bool = False,
    ) -> Layout:
        """A layout as it may be written. Raises SourceError for an unknown preset or role."""
        if preset is not None and preset not in PRESETS:
            raise SourceError("the preset is unknown", expected=", ".join(PRESETS), found=repr(preset))
        return cls(Names.of(columns), preset, None if root is None else str(root), text_to_image)

    @property
    def columns(self) -> Names:
        """The names of columns: those that were given, and the preset's. Raises SourceError if it has none."""
        if self.preset is None:
            return self.names
        if (base := PRESETS[self.preset].columns) is None:
            raise SourceError(
                f"the preset {self.preset} is a layout of folders",
                expected="a folder",
                found="a table",
                hint="name columns with data.columns instead",
            )
        return self.names.over(base)

    def over(self, base: Layout) -> Layout:
        """This layout, and that of `base` where this one says nothing."""
        own = self.preset is not None or self.names != Names()
        return Layout(
            self.names if own else base.names,
            self.preset if own else base.preset,
            self.root or base.root,
            base.text_to_image,
        )


DEFAULT = Layout()
"""qie's own names, beside the table."""


def fitting_preset(columns: Collection[str]) -> str | None:
    """The preset that a table's columns look like."""
    return next((name for name, preset in PRESETS.items() if preset.fits(columns)), None)
