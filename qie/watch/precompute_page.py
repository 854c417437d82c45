"""The page of shards that are being written: how far, how fast, by whom, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qie.data.sources import Source
from qie.errors import UsageError
from qie.html_report.markup import Html, cut, foreign, join, note, panel, part_bar, table, tag
from qie.quantities import human_bytes, human_count, human_time
from qie.stats.exclusion import change_excluded
from qie.watch.controls import button, copied
from qie.watch.live_page import LiveFacts, LivePage, WebFile
from qie.watch.precompute_reader import PrecomputeReader
from qie.watch.skipped_pictures import SkippedPictures

STATES = {
    "running": ("good", "running", ""),
    "silent": ("bad", "silent", ""),
    "failed": ("bad", "failed", ""),
    "stopped": ("warn", "stopped", "run the same command again to continue"),
    "finished": ("good", "finished", ""),
    "idle": ("soft", "nobody writes here", ""),
}
WORKER_STATES = {
    "running": ("good", "alive"),
    "stuck": ("warn", "alive, but does no row"),
    "silent": ("bad", "silent"),
    "failed": ("bad", "failed"),
    "stopped": ("warn", "stopped"),
    "finished": ("soft", "finished"),
}
MOST_WORKERS = 64
MOST_PROMPT = 400

_PICTURE = re.compile(r"(\d{1,4})/(.+)", re.DOTALL)


def precompute_page(places: Sequence[str], source: Source | None = None) -> LivePage:
    """A page of folders of shards; with their source, of the skipped rows' pictures, too."""
    readers = [PrecomputeReader(place, None if source is None else SkippedPictures(source)) for place in places]

    def picture(name: str) -> WebFile | None:
        match = _PICTURE.fullmatch(name)
        number = int(match[1]) if match else len(readers)
        return readers[number].picture(match[2]) if match and number < len(readers) else None

    return LivePage(
        "precompute",
        "Precompute",
        lambda: {"folders": [reader.read() for reader in readers]},
        render_precompute,
        picture,
        lambda action, values: change_sample(readers, action, values),
        lambda facts: [alert for one in facts["folders"] for alert in one["alerts"]],
        _title,
    )


def change_sample(readers: Sequence[PrecomputeReader], action: str, values: Mapping[str, Any]) -> str:
    """Exclude a sample that is shown, or include it again. Returns what was done.

    Raises:
        UsageError: there is no such button, or the sample is not shown.
    """
    number, key = values.get("folder"), values.get("key")
    known = action in ("exclude", "include") and type(number) is int and 0 <= number < len(readers)
    if not known or not isinstance(key, str):
        raise UsageError("this page has no such button", found=action)
    reader = readers[number]  # type: ignore[index]
    index = reader.newest.index_of(key)
    if index is None:
        raise UsageError("this sample is no longer among the newest", found=key[:12], hint="use qie stats --exclude")
    changed = change_excluded([index], [key], []) if action == "exclude" else change_excluded([index], [], [key])
    reader.forget()
    found = (*changed.excluded, *changed.included)
    return f"row {found[0].row} {'is left out' if action == 'exclude' else 'is trained on again'}" if found else "done"


def _title(facts: LiveFacts) -> str:
    done, total = (sum(one["rows"][name] for one in facts["folders"]) for name in ("done", "total"))
    mark = "⚠ " if any(one["alerts"] for one in facts["folders"]) else ""
    return f"{mark}{done / total:.0%} · qie precompute" if total else "qie precompute"


def render_precompute(facts: LiveFacts) -> Mapping[str, Html]:
    """The page's parts: of several folders, one after the other."""
    parts: dict[str, Html] = {}
    for number, one in enumerate(facts["folders"]):
        parts |= {
            f"top-{number}": tag("header", *_head(one)),
            f"alerts-{number}": _alerts(one["alerts"]),
            f"pace-{number}": _pace(one),
            f"workers-{number}": _workers(one["workers"]),
            f"newest-{number}": _newest(number, one),
            f"skipped-{number}": _skipped(number, one),
            f"faults-{number}": _faults(one["faults"]),
        }
    return parts


def _head(one: Mapping[str, Any]) -> list[Html]:
    rows, rate, size = one["rows"], one["rate"], one["bytes"]
    left = "–" if one["left_s"] is None else human_time(one["left_s"])
    tiles = {
        "rows": (f"{rows['done']:,}", f"of {rows['total']:,}{_of_source(rows)}"),
        "rows a second": (_figure(rate["minute"]), f"{_figure(rate['overall'])} since it began"),
        "time left": (left, ""),
        "skipped rows": (f"{one['skipped']['count']:,}", ""),
        "excluded": (f"{one['excluded']:,}", ""),
        "written": (_bytes(size["written"]), f"in {human_count(one['shards'], 'shard')}"),
        "still to write": (_bytes(size["to_come"]), _room(size)),
    }
    shown = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more else ""))
        for name, (value, more) in tiles.items()
        if value not in ("–", "0", "0 B") or name == "rows"
    ]
    done = rows["done"] / rows["total"] if rows["total"] else 0.0
    unread = one["indexes_left"]
    return [
        tag("p", "Precompute", class_="soft"),
        tag("h1", tag("bdi", one["place"].rstrip("/").rpartition("/")[2] or one["place"])),
        tag("p", _state(one), class_="states"),
        tag("p", tag("bdi", one["place"]), class_="place"),
        tag("dl", *shown, class_="tiles"),
        tag("div", part_bar(done), class_="progress"),
        note(f"Reading indexes: {unread:,} are left, and their skipped rows and bytes still to come.")
        if unread
        else Html(""),
    ]


def _alerts(alerts: Sequence[Mapping[str, Any]]) -> Html:
    if not alerts:
        return Html("")
    items = [tag("li", foreign(one["text"], 600), " ", tag("span", one["advice"], class_="soft")) for one in alerts]
    return tag("section", tag("ul", *items), class_="panel alerts", role="status", aria_label="Alerts")


def _state(one: Mapping[str, Any]) -> Html:
    kind, word, more = STATES[one["state"]]
    return join(tag("span", word, class_=f"state {kind}"), tag("span", more) if more else Html(""))


def _of_source(rows: Mapping[str, Any]) -> str:
    return f"; the source has {rows['source']:,}" if rows["source"] and rows["source"] != rows["total"] else ""


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _bytes(count: int | None) -> str:
    return "–" if count is None else human_bytes(count)


def _room(size: Mapping[str, Any]) -> Html:
    """What is free on the disk, and whether that suffices."""
    if size["free"] is None:
        return Html("")
    free = f"{human_bytes(size['free'])} free"
    return join(free) if size["fits"] is not False else tag("span", f"only {free}", class_="bad")


def _pace(one: Mapping[str, Any]) -> Html:
    """The stages of the workers that are alive."""
    slowest = one["bottleneck"]
    if slowest is None:
        return Html("")
    rows = [
        (stage["words"], f"{stage['busy']:.0%}", part_bar(stage["busy"]), _figure(stage["rate"] or None))
        for stage in one["stages"]
    ]
    advice = note(slowest["advice"][0].upper() + slowest["advice"][1:] + ".") if slowest["advice"] else Html("")
    return tag(
        "section",
        tag("h2", "Bottleneck"),
        panel(
            tag("p", "The slowest stage is ", tag("strong", slowest["words"]), "."),
            advice,
            table(("stage", "busy", "", "rows a second when busy"), rows, numbers=(1, 3)),
        ),
        id="bottleneck",
    )


def _workers(workers: Sequence[Mapping[str, Any]]) -> Html:
    if not workers:
        return Html("")
    order = list(WORKER_STATES)
    first = sorted(workers, key=lambda one: (order.index(one["state"]) in (0, 5), one["host"], one["pid"]))
    rows = [_worker(one) for one in first[:MOST_WORKERS]]
    heads = ("worker", "state", "rows", "done", "skipped", "rows a second", "last heard of")
    left = len(workers) - len(rows)
    more = note(f"and {left:,} more") if left else Html("")
    return tag("section", tag("h2", "Workers"), panel(table(heads, rows, numbers=(3, 4, 5)), more), id="workers")


def _worker(one: Mapping[str, Any]) -> tuple[str, ...]:
    kind, words = WORKER_STATES[one["state"]]
    state = tag("span", words, class_=f"state {kind}")
    if one["state"] in ("running", "stuck") and one["waits_for"]:
        state = join(state, note(f"waits for {human_count(one['waits_for'], 'shard')} of another run"))
    if one["message"]:
        state = join(state, tag("div", foreign(one["message"])))
    task = f" {one['task']}" if one["task"] else ""
    return (
        foreign(f"{one['host']}, process {one['pid']}{task}", 80),
        state,
        f"{one['rows'][0]:,} to {one['rows'][1]:,}",
        f"{one['done']:,}",
        f"{one['skipped']:,}",
        _figure(one["rate"]),
        _ago(one["age_s"]),
    )


def _ago(seconds: float) -> str:
    if seconds < 10:
        return "just now"
    return f"{seconds // 10 * 10:.0f} s ago" if seconds < 120 else f"{human_time(seconds // 60 * 60)} ago"


def _newest(number: int, one: Mapping[str, Any]) -> Html:
    if not one["newest"]:
        return Html("")
    cards = [_card(number, sample) for sample in one["newest"]]
    return tag("section", tag("h2", "Newest samples"), tag("ul", *cards, class_="newest"), id="newest")


def _card(number: int, sample: Mapping[str, Any]) -> Html:
    name = f"row {sample['row']:,}" + (f", variant {sample['variant']}" if sample["variant"] else "")
    ends = ["target", "rejected target"] if sample["paired"] else ["target"]
    controls = range(1, len(sample["pictures"]) - len(ends) + 1)
    words = [*(f"control {n}" for n in controls), *ends]
    shown = [
        tag("img", src=f"picture/{number}/{one}", alt=f"{what} of {name}", title=what)
        for one, what in zip(sample["pictures"], words, strict=False)
    ]
    out = sample["excluded"]
    change = "include" if out else "exclude"
    return tag(
        "li",
        tag("div", *(shown or [Html("no picture")]), class_="picture"),
        tag(
            "div",
            tag("h3", name, tag("small", "excluded") if out else ""),
            tag("p", foreign(cut(sample["prompt"], MOST_PROMPT), MOST_PROMPT + 40), class_="prompt"),
            tag("p", foreign(sample["name"], 80), tag("br"), f"{sample['size']}", class_="soft"),
            tag("p", button(change, change, folder=number, key=sample["key"]), class_="buttons"),
            class_="about",
        ),
        class_="excluded" if out else None,
    )


def _skipped(number: int, one: Mapping[str, Any]) -> Html:
    skipped = one["skipped"]
    if not skipped["count"]:
        return Html("")
    blocks = [
        tag(
            "details",
            tag("summary", f"{reason['count']:,} × ", foreign(reason["reason"])),
            tag("ul", *(_skipped_row(number, gone) for gone in reason["rows"]), class_="rows"),
            note(f"and {reason['count'] - len(reason['rows']):,} more")
            if reason["count"] > len(reason["rows"])
            else Html(""),
            data_name=cut(reason["reason"], MOST_PROMPT),
        )
        for reason in skipped["reasons"]
    ]
    left = skipped["of_reasons"] - len(blocks)
    more = note(f"and {left:,} other reasons; qie stats has them all") if left else Html("")
    again = "qie precompute --config CONFIG.yaml --retry-skipped"
    return tag(
        "section",
        tag("h2", "Skipped rows"),
        panel(*blocks, more, note("When their files are mended, this tries them again:"), copied(again)),
        id="skipped",
    )


def _skipped_row(number: int, gone: Mapping[str, Any]) -> Html:
    images = [tag("img", src=f"picture/{number}/{one}", alt="") for one in gone["pictures"]]
    return tag("li", f"row {gone['row']:,}: ", foreign(gone["name"], 120), *([tag("div", *images)] if images else []))


def _faults(faults: Sequence[str]) -> Html:
    if not faults:
        return Html("")
    listed = tag("ol", *(tag("li", foreign(fault, 500)) for fault in faults[:20]))
    return tag("section", tag("h2", "What could not be read"), panel(listed, class_="panel faults"), id="faults")
