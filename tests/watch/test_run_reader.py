"""What a run's files say, read again and again while they grow."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qie.errors import UsageError
from qie.watch.differences import differing
from qie.watch.run_pictures import RunPictures
from qie.watch.run_reader import RunReader, is_run
from qie.watch.training_page import training_page
from qie.watch.webhook import Webhook
from tests.watch.live_runs import NOW, line, of_pairs, validation, write_picture, write_run


def reader(run: Path, after_s: float = 100.0) -> RunReader:
    return RunReader(run, lambda: NOW + after_s)


def changed(run: Path, **values: Any) -> None:
    """Other values in state.json."""
    told = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(told | values))


def alerts(run: Path, after_s: float = 100.0) -> dict[str, str]:
    return {alert["kind"]: alert["text"] for alert in reader(run, after_s).read()["alerts"]}


def test_only_what_is_new_is_read_and_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    found = reader(run)
    assert found.read()["step"] == 20, "of the last validation"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(21)[:30])
        file.flush()
        assert found.read()["count"] == 3
        file.write(line(21)[30:] + "not JSON\n" + '{"step": true}\n' + "[" * 10_000 + "\n")
        file.flush()
        facts = found.read()
    assert (facts["count"], facts["step"], facts["damaged_lines"]) == (4, 21, 3)
    json.dumps(facts, allow_nan=False)


def test_whatever_a_file_says_is_shown_or_left_out(tmp_path: Path) -> None:
    hostile = [None, True, -1, 1e308, 10**400, "<b>", "\ud800", [], {}, [1, 2, 3, 4], {"a": {"b": []}}, 2**63]
    for number, value in enumerate(hostile):
        run = tmp_path / str(number)
        run.mkdir()
        for name in ("state.json", "run.json"):
            told = dict.fromkeys(("config", "samples", "devices", "finished", "time", "pid", "steps", "error"), value)
            (run / name).write_text(json.dumps(told | {"state": "training"}))
        names = json.loads(line(1, **of_pairs(1, 0)))
        lines = [json.dumps(dict.fromkeys(names, value) | {"step": step}) for step in (1, 2)]
        checks = [json.dumps({"step": 2, "validation_loss": value, "validation_loss_by_level": value})]
        (run / "metrics.jsonl").write_text("\n".join([*lines, *checks]) + "\n")
        page = training_page([run])
        facts = page.facts()
        json.dumps([facts, page.render(facts), page.title(facts)], allow_nan=False).encode()


def test_a_run_that_resumed_from_an_earlier_step_shows_each_step_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 9)
    found = reader(run)
    found.read()
    (run / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))  # the same file, cut
    assert found.read()["count"] == 5
    other = run / "other"
    other.write_text("".join(line(step, loss=7.0) for step in (1, 2, 3, 4, 5, 3, 4)))
    other.replace(run / "metrics.jsonl")
    facts = found.read()
    assert facts["curves"]["loss"]["steps"] == [1, 2, 3, 4] and facts["curves"]["loss"]["values"] == [7.0] * 4


def test_a_long_run_is_told_by_as_many_points_as_have_room(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    (run / "metrics.jsonl").write_text("".join(line(step, loss=float(step % 2)) for step in range(1, 2001)))
    loss = reader(run).read()["curves"]["loss"]
    assert len(loss["steps"]) <= 240 and loss["steps"][-1] == 2000
    assert set(loss["low"]) == {0.0} and set(loss["high"]) == {1.0}
    assert all(0.4 < value < 0.6 for value in loss["values"])


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"state": "paused"}, "paused"),
        ({"state": "failed", "error": "the loss is not finite"}, "failed"),
        ({"host": socket.gethostname(), "pid": os.getpid()}, "training"),
        ({"host": socket.gethostname(), "pid": 2**22 + 1}, "gone"),
        ({"state": "finished", "host": socket.gethostname(), "pid": 2**22 + 1}, "finished"),
    ],
)
def test_the_state_is_what_the_run_says_unless_its_process_is_gone(
    tmp_path: Path, told: dict[str, Any], state: str
) -> None:
    run = write_run(tmp_path / "run")
    changed(run, **told)
    assert reader(run).read()["state"] == state


def test_a_run_of_an_earlier_version_has_a_state_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "state.json").unlink()
    assert reader(run).read()["state"] == "training"
    assert reader(run, 10_000).read()["state"] == "silent"
    (run / "run.json").write_text('{"finished": "2027-01-01T00:00:00+00:00", "config": []}')
    assert reader(run, 10_000).read()["state"] == "finished"
    (run / "metrics.jsonl").unlink()
    (run / "run.json").write_text("{")
    facts = reader(run).read()
    assert (facts["state"], facts["step"], facts["alerts"]) == ("waiting", 0, [])


def test_a_folder_of_anything_else_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": "of another program"}')
    assert not is_run(tmp_path)
    (tmp_path / "checkpoint-000010").mkdir()
    assert is_run(tmp_path)


def test_a_calm_run_has_no_alert_and_a_silent_one_has_unless_it_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert alerts(run) == {}
    assert alerts(run, 80 + 720) == {"silent": "No step for 12 min."}
    changed(run, state="paused")
    assert alerts(run, 80 + 720) == {}


def test_new_steps_are_a_sign_of_life_whatever_the_other_machine_s_clock_says(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = reader(run, 5000)
    assert [alert["kind"] for alert in found.read()["alerts"]] == ["silent"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(41))
    assert found.read()["alerts"] == []


def test_alerts_are_told_in_words_with_their_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    steps = [line(step, data_wait_s=0.5, grad_norm=12.5 if step == 30 else 0.5) for step in range(1, 40)]
    steps += [line(40, loss=None)]
    rising = [validation(step, 0.1 * step) for step in (5, 10, 20, 30)]
    (run / "metrics.jsonl").write_text("".join(steps + rising))
    (run / "checkpoint-000004").mkdir()
    found = reader(run).read()["alerts"]
    assert {alert["kind"]: alert["text"] for alert in found} == {
        "waiting": "The last 40 steps waited for data for 25% of their time.",
        "loss": "1 of the last 40 steps had no finite loss, and changed nothing.",
        "gradient": "At step 30 the gradient norm was 12.5, 25 times the usual 0.5.",
        "validation": "The validation loss rose 3 times in a row, from 0.5000 at step 5 to 3.0000.",
    }
    assert "checkpoint-000004" in found[-1]["advice"]
    changed(run, state="failed", error="the loss is not finite")
    assert alerts(run)["failed"] == "The run failed: the loss is not finite"


def test_a_run_of_pairs_shows_what_it_prefers_and_tells_when_it_only_leaves_its_base(tmp_path: Path) -> None:
    plain, run = (write_run(tmp_path / name) for name in ("plain", "run"))
    checks = [validation(step, 0.1, **of_pairs(-reward, -3.0)) for step, reward in ((10, 0.5), (20, 0.25), (30, 1.5))]

    def facts(target: float, rejected: float, accuracy: float = 0.75) -> dict[str, Any]:
        steps = [line(step, **of_pairs(target, rejected, accuracy)) for step in range(1, 41)]
        (run / "metrics.jsonl").write_text("".join(steps + checks))
        return training_page([run]).facts()

    calm = facts(1.0, -1.0)["runs"][0]
    assert [alert["kind"] for alert in calm["alerts"]] == ["reward"]
    assert calm["curves"]["margin"]["values"][-1] == 2.0 and calm["curves"]["margin_1"]["values"] == [None] * 40
    assert calm["validations"][-1]["target_reward"] == -1.5 and calm["recent"]["accuracy"] == 0.75
    checks[1] = validation(20, 0.1, **of_pairs(0.25, -3.0))
    assert facts(-1.0, -7.5)["runs"][0]["alerts"] == [], "a large mean of few is not what all have"
    (told,) = facts(-1.0, -7.5, 1.0)["runs"][0]["alerts"]
    assert told["text"] == "Of the last 40 steps 100% of the pairs are right, by a margin of 6.5: they teach no more."
    titles = ["Accuracy", "Margin", "Rewards", "Rewards of held-out pairs", "Margin by noise level"]
    for runs, shown in (([run], titles), ([run, plain], titles[:2]), ([plain], [])):
        page = training_page(runs)
        parts = page.render(page.facts())["curves"]
        assert [title for title in titles if f"<h3>{title}<" in parts] == shown


def test_the_loss_of_preserved_rows_has_a_curve_where_a_step_had_some(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    steps = [line(step, preserved_loss=0.25 if step % 2 else None) for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join([*steps, validation(40, 0.1, preserved_loss=0.5)]))
    page = training_page([run])
    facts = page.facts()
    assert facts["runs"][0]["further"] == ["preserved_loss"] and "<h3>Preserved loss<" in page.render(facts)["curves"]
    assert facts["runs"][0]["curves"]["preserved_loss"]["values"] == [0.25] * 40


def test_a_disk_that_has_no_room_for_two_checkpoints_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr("qie.watch.run_reader._free", lambda folder: 1_500_000_000)
    assert alerts(run) == {"disk": "1.5 GB are left on the disk."}


def test_a_webhook_is_told_each_new_alert_once_and_what_fails_is_tried_again(tmp_path: Path) -> None:
    posted: list[dict[str, Any]] = []
    said: list[str] = []
    works = [False]

    def post(url: str, body: bytes) -> None:
        if not works[0]:
            raise ConnectionRefusedError("refused")
        posted.append(json.loads(body))

    hook = Webhook("https://example.org/hook", said.append, post)
    found = reader(write_run(tmp_path / "run"), 80 + 720).read()["alerts"]
    hook.look(found)
    hook.look(found)
    assert len(said) == 1 and "refused" in said[0] and "No step for 12 min" in said[0]
    works[0] = True
    hook.look(found)
    hook.look(found)
    assert [one["text"] for one in posted] == ["run: No step for 12 min. Look at its log, and at its GPU."]
    assert (posted[0]["kind"], posted[0]["step"]) == ("silent", 40)
    hook.look([])
    hook.look(found)
    assert len(posted) == 2, "it came again"
    for url in ("file:///etc/passwd", "example.org", "https://"):
        with pytest.raises(UsageError, match="posted"):
            Webhook(url, said.append)


def test_configurations_differ_key_by_key(tmp_path: Path) -> None:
    one = {"model": {"lora": {"r": 16}}, "train": {"seed": 0}}
    other = {"model": {"lora": {"r": 32}}, "train": {"seed": 0, "epochs": 3}}
    assert differing([one, other]) == {"model.lora.r": ["16", "32"], "train.epochs": [None, "3"]}
    assert differing([one, {}]) == differing([{}, {}]) == {}, "a run without run.json is not known to differ"


def test_an_input_is_what_the_run_saw_where_it_has_kept_that(tmp_path: Path) -> None:
    """In a copied folder, and after the image has changed."""
    run, kept = write_run(tmp_path / "run"), "inputs/0123456789abcdef.jpg"
    (run / "samples" / "inputs").mkdir()
    Image.new("RGB", (20, 20)).save(run / "samples" / kept)
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    write_picture(run, 0, 0, (9, 9, 9), images=["a.png"])
    write_picture(run, 0, 1, (9, 9, 9), prompt="kept", images=["a.png"], inputs=[kept])
    write_picture(run, 0, 2, (9, 9, 9), prompt="away", images=["a.png"], inputs=["inputs/../../../a.png"])
    pictures = RunPictures(run)
    found = {row["prompt"]: pictures.file(f"{row['id']}/input-0") for row in pictures.read()}
    kinds = {prompt: file.kind if file else None for prompt, file in found.items()}
    assert kinds == {"make it night": "image/png", "kept": "image/jpeg", "away": "image/png"}


def test_pictures_of_one_prompt_make_a_row_with_input_and_target(tmp_path: Path) -> None:
    run, name = write_run(tmp_path / "here" / "run"), "cat_control_1.png"
    for place in (f"control_images/{name}", "training_images/cat.jpg"):
        (tmp_path / place).parent.mkdir()
        Image.new("RGB", (40, 30)).save(tmp_path / place)
    images = [f"control_images/{name}", "gone.png", "../../etc/passwd"]
    for step in (0, 10, 20):
        write_picture(run, step, 0, (9, 9, 9), images=images)
    write_picture(run, 20, 1, (9, 9, 9), prompt="another")
    (run / "samples" / "step-000030-0.png").write_bytes(b"no picture")
    pictures = RunPictures(run)
    rows = {row["prompt"]: row for row in pictures.read()}
    first = rows["make it night"]
    assert (first["steps"], first["inputs"], first["target"]) == ([0, 10, 20], 1, True)
    assert rows["another"]["steps"] == [20] and rows["sample 0"]["steps"] == [30]
    for file, kind in (("input-0", "png"), ("target", "jpeg")):
        found = pictures.file(f"{first['id']}/{file}")
        assert found is not None and found.kind == f"image/{kind}"
    (run / "samples" / "inputs").mkdir()
    Image.new("RGB", (20, 10)).save(run / "samples" / "inputs" / f"{7:016x}.jpg")
    write_picture(run, 30, 2, (9, 9, 9), images=images, inputs=[f"inputs/{7:016x}.jpg"])
    kept = next(row for row in pictures.read() if 30 in row["steps"] and row["prompt"] == "make it night")
    found = pictures.file(f"{kept['id']}/input-0")
    assert kept["inputs"] == 1 and found is not None and found.kind == "image/jpeg", "what the run kept beside them"
    small = pictures.file("small/step-000010-0.png")
    assert small is not None and small.kind == "image/webp" and len(small.content) < 1000
    for name in (
        "step-000030-0.png",
        "small/step-000030-0.png",
        "../metrics.jsonl",
        "../../x.png",
        "small//etc/passwd",
    ):
        assert pictures.file(name) is None, name
