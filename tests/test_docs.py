"""Documentation that is true: links lead somewhere, every command, option and public name is described, figures of
memory are what the estimator says, and messages are those that the code has. Offline; `make docs` builds the site.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import QwenImageTransformer2DModel
from torch.distributed.elastic.multiprocessing import PContext

import qie
import qie.legacy
from benchmarks.samples import RECIPE_21 as RECIPE_OF_2_1
from benchmarks.samples import made, made_newer, record_of
from qie import first_config
from qie.cli.one_command import SUBCOMMANDS
from qie.config import Config, load_config
from qie.config.schema import DataConfig
from qie.data.sources import Guess
from qie.encode.images import MAX_RATIO
from qie.families import FAMILIES
from qie.image_formats import IMAGE_FORMATS
from qie.precompute.ray import MOST_ASKED, REMIND_S, RETRIES, SHARDS_PER_PLACE
from qie.shards.cache import PART_BYTES as GET_BYTES
from qie.shards.compact_index import OF_SHARDS, TEXTS
from qie.shards.record import encode
from qie.shards.sample_table import COLUMNS
from qie.stores.objects import PART_BYTES as PUT_BYTES
from qie.stores.retry import REQUEST_S, RETRY_S
from qie.training import memory
from qie.training.dry_run import forecast
from qie.training.memory import Parameters, estimate
from qie.training.model.lora import add_lora
from qie.training.reporting.metrics import Preference, StepMetrics
from tests.builders import RECIPE_21, make_recipe, make_sample, make_sample_21, split_record, write_shard
from tests.conftest import ROOT
from tools import command_docs, site_files

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`|^ {4}[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Those of a page's headings, as GitHub and the site make them: lower case, no punctuation, blanks as hyphens."""
    fences = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", fences.sub("", text_of(page)), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings)


def broken_links(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(CODE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_file() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


# The site.


class _Loader(yaml.SafeLoader):
    """Of mkdocs.yml, which names a function of Python; here it is not called."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def navigated(entries: list[object]) -> list[str]:
    return [
        page
        for entry in entries
        for page in ([entry] if isinstance(entry, str) else navigated(next(iter(dict(entry).values()))))  # type: ignore[call-overload]
    ]


def test_every_page_is_in_the_navigation_or_a_decision_in_the_index_of_decisions() -> None:
    there = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    records = [f"decisions/{name}" for name in LINK.findall(text_of(DOCS / "decisions" / "index.md"))]
    assert sorted([*navigated(SITE["nav"]), *records]) == sorted([*there, *site_files.PAGES])


def test_the_site_and_its_diagram_ask_no_other_host_and_whatever_is_broken_is_an_error() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(SITE)
    assert all((DOCS / script).is_file() for script in SITE["extra"]["polyfills"])
    diagram = text_of(DOCS / "data.svg").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?(?!#)[^)\"']+", diagram) == []
    assert set(SITE["validation"]["links"].values()) == {"warn"}
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text(), "with --quiet, mkdocs counts no warnings"


# Commands, options, names.

COMMANDS = DOCS / "commands.md"


def test_the_page_of_commands_is_what_the_tool_writes_of_every_command_of_the_package() -> None:
    assert command_docs.MARKER in text_of(COMMANDS)
    assert command_docs.page(text_of(COMMANDS)) == text_of(COMMANDS), "run python tools/command_docs.py"
    commands = {path.stem for path in (ROOT / "qie" / "cli").glob("*.py") if "\n@command\n" in path.read_text()}
    assert {f"qie.cli.{name}" for name in commands} == {module for module, _ in SUBCOMMANDS.values()}


REFERENCE = re.findall(
    r"^::: (qie[\w.]*)\n(?: +options: \{heading: ([\w.]+),)?", text_of(DOCS / "reference.md"), re.MULTILINE
)


def test_every_public_name_is_in_the_reference_in_the_right_place_and_each_old_one_in_prose() -> None:
    shown = {heading.removeprefix("qie."): path for path, heading in REFERENCE if heading}
    assert shown == {name: f"{module}.{name}" for name, module in qie._EXPORTS.items()}
    legacy = {path.rpartition(".")[2] for path, _ in REFERENCE if path.startswith("qie.legacy.")}
    assert legacy == set(qie.legacy.__all__)
    assert all(pkgutil.resolve_name(path).__doc__ for path, _ in REFERENCE)
    prose = "\n".join(text_of(page) for page in PAGES if page.name not in ("reference.md", "CHANGELOG.md"))
    assert [name for name in legacy if name not in prose] == []


def test_names_that_the_pages_use_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:\w+=)?(qie(?:\.[a-zA-Z_]\w*)+)[`(]", text_of(page)):
            assert name.startswith("qie.cli.") or pkgutil.resolve_name(name), f"{page.name}: {name}"


def test_environment_variables_of_qie_are_described() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "qie").rglob("*.py"))
    assert set(re.findall(r"\bQIE_\w+", source)) == set(re.findall(r"\bQIE_\w+", text_of(COMMANDS)))


# Names and numbers that the code has.


def cells_under(page: str, head: str) -> list[list[list[str]]]:
    """Of each table under a line, for each row, what stands as code in each cell."""
    tables = text_of(DOCS / page).split(f"\n{head}\n")[1:]
    assert tables, head
    rows = (line for table in tables for line in table.partition("\n\n")[0].splitlines()[1:])
    return [[re.findall(r"`(\w+)`", cell) for cell in line.strip("| ").split(" | ")] for line in rows]


def test_the_page_of_the_format_names_what_records_indexes_and_compacted_indexes_have(tmp_path: Path) -> None:
    recipe = make_recipe(thumbnail_px=24)
    sample = make_sample(1, masked=True, paired=True, recipe=recipe)
    record = encode(sample, recipe.digest)
    header = json.loads(record[8 : 8 + int.from_bytes(record[:8], "little")])
    about = json.loads(header.pop("__metadata__")["qie"])
    tensors = cells_under("format.md", "| tensor | dtype | shape | what |")
    assert {row[0][0]: row[1][0] for row in tensors} == {name: entry["dtype"] for name, entry in header.items()}

    write_shard(tmp_path, [replace(sample, pictures=b"a JPEG")], recipe=recipe)
    (index,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    told = [name for row in cells_under("format.md", "| name | type | what |") for name in row[0]]
    assert sorted(told) == sorted([*about, *index, *recipe.to_dict(), "image_slots", "prompt_dtype"])
    text_alone = split_record(encode(make_sample_21(), RECIPE_21.digest))
    assert text_alone[1].keys() - about.keys() == {"image_slots"}
    assert RECIPE_21.to_dict().keys() - recipe.to_dict().keys() == {"prompt_dtype"}
    assert {name for name, entry in text_alone[0].items() if entry["dtype"] == "BF16"} == {
        "prompt_embed",
        "empty_prompt_embed",
    }
    kinds = {"uint8": "U8", "int32": "I32", "int64": "I64", "bool": "BOOL"}
    for of, expected in {"sample": COLUMNS, "shard": OF_SHARDS | dict.fromkeys(TEXTS, np.dtype(np.uint8))}.items():
        columns = {}
        for names, dtypes, *_ in cells_under("format.md", f"| tensor | dtype | shape | of each {of} |"):
            columns |= dict(zip(names, dtypes * len(names) if len(dtypes) == 1 else dtypes, strict=False))
        assert columns == {name: kinds[dtype.name] for name, dtype in expected.items()}


def test_the_page_of_training_names_what_a_line_of_metrics_has() -> None:
    rows = cells_under("training.md", "| `metrics.jsonl`, a step | |")
    of_pairs = Preference(0, 0, 0, 0, (), ()).flat().keys()
    expected = {field.name for field in fields(StepMetrics)} - {"preference"} | of_pairs
    assert {name for names, *_ in rows for name in names} == expected


NUMBERS = {5: "five", 8: "eight", 16: "sixteen"}
SENTENCES = [
    ("guides/ray.md", f"for every {NUMBERS[SHARDS_PER_PLACE]} shards that wait, {MOST_ASKED} at a time"),
    ("guides/ray.md", f"is dealt again, {NUMBERS[RETRIES]} times"),
    ("guides/ray.md", f"again every {REMIND_S:g} s"),
    ("guides/s3.md", f"up to {RETRY_S:g} s (`QIE_STORE_RETRY_S`); a store that is silent for {REQUEST_S:g} s"),
    ("guides/s3.md", f"shuffled within {NUMBERS[DataConfig().block_size]} of them"),
    ("guides/your-card.md", f"fits into {100 * first_config.MARGIN:g} % of the GPU"),
    ("commands.md", f"`QIE_STORE_TIMEOUT_S` ({REQUEST_S:g}), `QIE_STORE_RETRY_S` ({RETRY_S:g})"),
    (
        "encoding.md",
        f"qie reads {' and '.join(', '.join(IMAGE_FORMATS).rsplit(', ', 1))},".replace("WEBP", "WebP"),
    ),
    ("encoding.md", f"longer than {MAX_RATIO} times its width"),
    ("scaling.md", f"Uploads go in parts of {PUT_BYTES // 2**20} MiB"),
    ("scaling.md", f"whole shards come in parts of {GET_BYTES // 2**20} MiB"),
    ("training.md", f"have not ended after {inspect.signature(PContext.close).parameters['timeout'].default} s"),
]
"""(page, a number of the code or of a library in its sentence)."""


def sentences(page: str) -> str:
    """Of a page of docs/, on one line."""
    return " ".join(text_of(DOCS / page).split())


@pytest.mark.parametrize(("page", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_a_number_in_a_sentence_is_that_of_the_code(page: str, sentence: str) -> None:
    assert sentence in sentences(page)


# Messages.


@cache
def source_text() -> str:
    """All texts of the code, joined as Python joins neighbours, with a gap where something is put in."""
    found = []
    for path in (ROOT / "qie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def messages() -> list[str]:
    part = text_of(DOCS / "troubleshooting.md").partition("\n## Messages\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", part, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_is_one_that_the_code_has(message: str) -> None:
    pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
    assert pieces and all(piece in source_text() for piece in pieces)


# Memory.

RELEASED = {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584}


@cache
def prepared(lora: str, family: str) -> torch.nn.Module:
    """The released transformer without its weights, with the adapter of a configuration (JSON)."""
    with torch.device("meta"):
        if family == "qwen_image_21":
            transformer = newer_transformer()()
        else:
            transformer = QwenImageTransformer2DModel(**RELEASED, zero_cond_t=family == "edit_plus")
        transformer.requires_grad_(False)
    if settings := Config.model_validate(
        {"model": {"pretrained_model_name_or_path": "x", "lora": json.loads(lora)}}
    ).model.lora:
        add_lora(transformer, settings, 0, dtype=torch.float32)
    return transformer


def newer_transformer() -> type[torch.nn.Module]:
    if not hasattr(diffusers, FAMILIES["qwen_image_21"].transformer):
        pytest.skip("Qwen-Image-2.1 needs diffusers 0.42")
    return getattr(diffusers, FAMILIES["qwen_image_21"].transformer)


@dataclass(frozen=True)
class Figure:
    """A figure of a page's table: of what, the GB that it tells, and the run whose estimate it is."""

    label: str
    told: str
    config: str = "edit_lora"
    overrides: Sequence[str] = ()
    family: str = "edit"
    controls: int = 1
    processes: int = 1
    sharded: bool = False
    part: str = "total"

    def estimated_gb(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """What `qie-train` would say of a released model, with prompts as long as the pages say."""
        config = load_config(ROOT / "configs" / f"{self.config}.yaml", self.overrides)
        lora = config.model.lora and config.model.lora.model_dump(mode="json", exclude={"continue_from"})
        monkeypatch.setattr(memory, "empty_transformer", lambda pretrained: prepared(json.dumps(lora), self.family))
        monkeypatch.setattr(memory, "add_lora", lambda *arguments, **more: None)
        side = round((config.data.area_px if isinstance(config.data.area_px, int) else 1024 * 1024) ** 0.5)
        side = side // FAMILIES[self.family].latent_scale
        shape = SimpleNamespace(target=(side, side), controls=[(side, side)] * self.controls)
        lengths = np.array([{"edit": 1400, "edit_plus": 200 * self.controls + 100}.get(self.family, 100)])
        columns = SimpleNamespace(shape_names=[shape], lengths=lengths)
        kind = "FSDP" if self.sharded else "MULTI_GPU" if self.processes > 1 else "NO"
        group = SimpleNamespace(distributed_type=kind, num_processes=self.processes)
        stream = SimpleNamespace(samples=SimpleNamespace(columns=columns))
        setup = memory.plan_memory(config, SimpleNamespace(family=FAMILIES[self.family]), stream, group)
        return round(getattr(estimate(setup), self.part) / 1e9)


def tables(page: str, part: str) -> list[list[list[str]]]:
    """The tables of a guide's section that begins with `part`: the cells of their rows, the head first."""
    section = text_of(DOCS / "guides" / f"{page}.md").partition(f"## {part}")[2].partition("\n## ")[0]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        lines = [line for line in table.splitlines() if "---" not in line]
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    return found


def figures_of_guides() -> Iterator[Figure]:
    for page, part, shipped, family, processes in (
        ("24gb", "How much of ", "edit_lora_24gb", "edit_plus", 1),
        ("24gb", "Qwen-Image-2.1", "qwen_image_21_lora_24gb", "qwen_image_21", 1),
        ("80gb", "How much of ", "edit_plus_lora", "edit_plus", 1),
        ("80gb", "Qwen-Image-2.1", "qwen_image_21_lora", "qwen_image_21", 1),
        ("eight-gpus", "How much of ", "edit_plus_lora", "edit_plus", 8),
    ):
        head, *rows = tables(page, part)[0]
        assert head[-1] == "estimated" and rows
        for row in (dict(zip(head, row, strict=True)) for row in rows):
            yield Figure(
                f"{page} {' '.join(row.values())} {family}",
                row["estimated"],
                row.get("configuration", shipped),
                re.findall(r"`([^`]+)`", row["`--set`"]),
                family=family,
                controls=int(row["controls"]),
                processes=processes,
                sharded=row.get("started by") == "fsdp2.yaml",
            )


NEWER = {"config": "qwen_image_21_lora", "family": "qwen_image_21"}
TRAINING: dict[str, dict[str, Any]] = {
    "without changes": {},
    "`batch_size: 4`": {"overrides": ["data.batch_size=4"]},
    "checkpointing every second block": {"overrides": ["train.gradient_checkpointing=2"]},
    "`gradient_checkpointing: false`": {"overrides": ["train.gradient_checkpointing=false"]},
    "`offload_blocks: 30`": {"overrides": ["train.offload_blocks=30"]},
    "`offload_blocks: 60`": {"overrides": ["train.offload_blocks=60"]},
    "`quantize: fp8`": {"overrides": ["model.quantize=fp8"]},
    "`fp8`, checkpointing every second block": {"overrides": ["model.quantize=fp8", "train.gradient_checkpointing=2"]},
    "`fp8`, `offload_blocks: 30`": {"overrides": ["model.quantize=fp8", "train.offload_blocks=30"]},
    "`quantize: nf4`": {"overrides": ["model.quantize=nf4"]},
    "2511, bf16, two controls": {"family": "edit_plus", "controls": 2},
    "bf16, FSDP over eight GPUs": {"processes": 8, "sharded": True},
    "Qwen-Image-2.1": NEWER | {"overrides": ["train.draws_per_sample=1"]},
    "the same, `quantize: fp8`": NEWER | {"overrides": ["train.draws_per_sample=1", "model.quantize=fp8"]},
    "the same, `draws_per_sample: 4`": NEWER,
    "the same, both": NEWER | {"overrides": ["model.quantize=fp8"]},
}
"""Rows of the table in training.md -> the run."""


def figures_of_training() -> Iterator[Figure]:
    part = text_of(DOCS / "training.md").partition("\n## Memory\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+ GB) \| \| (.+?) \| (\d+ GB) \|$", part, re.MULTILINE)
    told = {label: size for row in rows for label, size in (row[:2], row[2:])}
    assert told.keys() == TRAINING.keys()
    yield from (Figure(label, told[label], **run) for label, run in TRAINING.items())
    quantised = re.findall(r"^\| `(\w+)` \|.* (\d+ GB) \| (\d+ GB) \|", text_of(DOCS / "training.md"), re.MULTILINE)
    assert [kind for kind, *_ in quantised] == ["null", "fp8", "int8", "nf4"]
    for kind, base, total in quantised:
        for size, which in ((base, "weights"), (total, "total")):
            yield Figure(f"{kind}, {which}", size, overrides=[f"model.quantize={kind}"], part=which)


FIGURES = [*figures_of_guides(), *figures_of_training()]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.label)
def test_a_page_s_figure_is_what_the_estimator_says(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    assert figure.told == f"{figure.estimated_gb(monkeypatch)} GB"


PLANS = [("edit_lora_24gb", "edit_plus", row) for row in tables("24gb", "How long a step takes")[0][1:]]
PLANS += [("edit_lora_24gb", "edit_plus", row) for row in tables("preferences", "What a pair takes")[0][1:]]
PLANS += [("qwen_image_21_lora_24gb", "qwen_image_21", row) for row in tables("24gb", "Qwen-Image-2.1")[1][1:]]
"""Configuration, family, and a row of the tables of dry runs: settings, blocks, GB of the GPU, host memory, seconds."""


@pytest.mark.parametrize(("shipped", "family", "row"), PLANS)
def test_the_guide_for_24_gb_tells_what_a_dry_run_does(
    shipped: str, family: str, row: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(ROOT / "configs" / f"{shipped}.yaml", re.findall(r"`([^`]+)`", row[0]))
    assert config.model.lora
    lora = json.dumps(config.model.lora.model_dump(mode="json", exclude={"continue_from"}))
    monkeypatch.setattr(memory, "empty_transformer", lambda pretrained: prepared(lora, family))
    monkeypatch.setattr(memory, "add_lora", lambda *arguments, **more: None)
    alone = SimpleNamespace(device=torch.device("cpu"), num_processes=1, distributed_type="NO")
    found = forecast(config, SimpleNamespace(family=FAMILIES[family]), None, alone, gpu="RTX 4090")
    told = "\n".join(found.lines())
    blocks, _, offloaded = re.findall(r"blocks      \d+: (.*)", told)[0].partition(" offloaded: ")
    numbers = [re.sub(r", \d+$", "", blocks) if offloaded else blocks]
    numbers += [re.findall(r"total +(\S+ GB) of", told)[0], offloaded.partition(" of ")[0]]
    assert row[1:] == [*numbers, re.findall(r"a step      about (\d+)", told)[0] + " s"]


SIZES = tables("disk", "A row")[0][1:]
DISK = {
    "Qwen-Image-Edit": lambda **given: record_of(made(0, **given)),
    "2509, 2511": lambda **given: record_of(made(0, **given)),
    "Qwen-Image-2.1": lambda side, **given: record_of(
        made_newer(0, side=side // 2, width=4096, tail=1, **given), RECIPE_OF_2_1
    ),
}


@pytest.mark.parametrize("row", SIZES, ids=" ".join)
def test_a_row_takes_the_disk_that_the_guide_tells(row: list[str]) -> None:
    model, images, controls, tokens, told, many = row
    pixels = int(images.removesuffix("²")) ** 2
    count = len(DISK[model](side=int(pixels**0.5) // 8, controls=int(controls), tokens=int(tokens.replace(",", ""))))
    assert (told, many) == (f"{count / 1e6:.1f} MB", f"{count / 1e4:,.0f} GB")
    by_hand = (1 + int(controls)) * pixels / 2 + int(tokens.replace(",", "")) * (8192 if model[-3:] == "2.1" else 7168)
    assert count - by_hand < 0.05e6


def test_the_guide_tells_what_qie_init_chooses_for_a_card() -> None:
    newer_transformer()
    rows = tables("your-card", "What it chooses")[0][1:]
    seen = first_config.Rows(Guess("", (), 100, 1), (1024 * 1024,), (1, 1), 20, 0, 0)
    for name, column in (("Qwen/Qwen-Image-Edit-2511", 1), ("Qwen/Qwen-Image-2.1", 3)):
        with first_config.model_of(name) as pretrained:
            run = first_config.largest_run(pretrained, seen)
        for row in rows:
            plan, setup = first_config.choose_plan(run, pretrained.family, float(row[0]))
            stored = f"`{plan.quantize}`" if plan.quantize else ""
            offloaded = f"{plan.offload_blocks} blocks offloaded" if plan.offload_blocks else ""
            assert row[column] == (", ".join(filter(None, (stored, offloaded))) or "as released")
            assert row[column + 1] == f"{estimate(setup).total / 1e9:.0f} GB"


def test_sizes_of_the_released_transformer_in_sentences_follow_from_its_numbers() -> None:
    """In bfloat16, in float32, with AdamW's state, and in eight processes."""
    sizes = Parameters.of(prepared("null", "edit"))
    count = sizes.trained + sizes.frozen
    usual = load_config(ROOT / "configs" / "edit_lora.yaml").model.lora
    assert usual
    lora = Parameters.of(prepared(json.dumps(usual.model_dump(mode="json", exclude={"continue_from"})), "edit")).trained
    mb = {size: f"{size * lora / 1e6:.0f} MB" for size in (4, 8, 12)}
    gb = {size: f"{size * count / 1e9:.0f} GB" for size in (2, 4, 12, 16, 32)}
    for page, sentence in (
        ("guides/eight-gpus.md", f"in float32: {gb[4]} each, {gb[32]} together"),
        ("guides/eight-gpus.md", f"A checkpoint is {gb[12]}, weights and AdamW's state"),
        ("guides/disk.md", f"{mb[12]} for a LoRA of `r: 16` on attention: weights {mb[4]}, AdamW's state {mb[8]}"),
        ("guides/disk.md", f"[all weights](eight-gpus.md#all-weights-fsdp2): {gb[12]}"),
        ("guides/80gb.md", f"weights do not fit: {gb[16]} with AdamW in float32"),
        ("guides/24gb.md", f"transformer {gb[2]}, "),
        ("guides/24gb.md", f"{sizes.matrices / 2 / 1e9:.0f} GB of it page-locked"),
        ("training.md", f"{100 * sizes.matrices / count:.1f} % of the released weights"),
        ("training.md", f"it takes {gb[2]} of host memory"),
        ("commands.md", f"{gb[2]} for Qwen-Image-Edit in bfloat16"),
    ):
        assert sentence in sentences(page), sentence


def test_the_configuration_for_24_gb_is_the_guide_s_but_for_the_model_and_the_folder(tmp_path: Path) -> None:
    guide = text_of(DOCS / "guides" / "24gb.md")
    (tmp_path / "my.yaml").write_text(re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[0])
    shipped = load_config(ROOT / "configs" / "edit_lora_24gb.yaml")
    changes = [f"model.pretrained_model_name_or_path={shipped.model.pretrained_model_name_or_path}"]
    assert load_config(tmp_path / "my.yaml", [*changes, f"train.output_dir={shipped.train.output_dir}"]) == shipped


def test_the_files_that_the_design_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", text_of(DOCS / "design.md").partition("## The layers")[2])
    assert len(named) > 8
    assert [
        name for name in named if not any((ROOT / root / name).is_file() for root in ("", "qie", "qie/data/sources"))
    ] == []
