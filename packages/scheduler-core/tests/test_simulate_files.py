"""What the simulator writes and searches: the trace, the page, the sweep, files, drafts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Scheduler, SchedulerConfig
from syncline.scheduler_core.simulate import CostModel, Setup, Workload, draw_load, parse_lengths
from syncline.scheduler_core.simulate.cli import main
from syncline.scheduler_core.simulate.loop import simulate
from syncline.scheduler_core.simulate.sweep import find_smallest_pool

SMALL: list[str] = [
    *("--num-requests", "12", "--prompt-len", "3-9", "--output-len", "5-30", "--block-size", "4"),
    *("--num-blocks", "20", "--max-num-seqs", "6", "--max-num-batched-tokens", "32"),
    *("--max-model-len", "64", "--admission-policy", "greedy"),
]


def events_of(path: Path) -> list[dict[str, Any]]:  # Any: JSON.
    with path.open(encoding="utf-8") as file:
        loaded: dict[str, list[dict[str, Any]]] = json.load(file)
    return loaded["traceEvents"]


def test_the_trace_is_json_whose_slices_are_balanced_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main([*SMALL, "--num-blocks", "20,200", "--trace", str(path)]) == 0
    events = events_of(path)
    assert {event["pid"] for event in events} == {1, 2}
    open_slices: Counter[tuple[int, int]] = Counter()
    last: dict[tuple[int, int], int] = {}
    for event in events:
        if event["ph"] not in "BE":
            continue
        track = (event["pid"], event["tid"])
        assert event["ts"] >= last.get(track, 0)
        last[track] = event["ts"]
        open_slices[track] += 1 if event["ph"] == "B" else -1
        assert open_slices[track] in (0, 1)
    assert open_slices and not any(open_slices.values())
    preempted = [event for event in events if event["ph"] == "i"]
    # The large pool preempts nobody and so has no track of a sequence.
    assert preempted and {event["pid"] for event in preempted} == {1}
    assert {pid for pid, _ in open_slices} == {1}
    for event in events:
        if event["ph"] == "C" and event["name"] == "blocks":
            assert sum(event["args"].values()) == (20 if event["pid"] == 1 else 200)


def test_the_steps_of_a_trace_follow_each_other_at_their_cost(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    cost = ["--us-per-step", "100", "--us-per-token", "3"]
    assert main([*SMALL, *cost, "--trace", str(path)]) == 0
    now = 0
    for event in events_of(path):
        if event["ph"] == "X":
            about = event["args"]
            assert event["ts"] == now
            assert event["dur"] == 100 + 3 * (about["prefill"] + about["decode"])
            now += event["dur"]
    assert now > 0


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main([*SMALL, "--num-blocks", "20,200", "--html", str(path)]) == 0
    text = path.read_text("utf-8")
    root = ET.fromstring(text)
    tags = Counter(element.tag.rpartition("}")[2] for element in root.iter())
    assert tags["svg"] == 4 and tags["table"] == 1 and tags["td"] > 30
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert text.count("http") == 1 and 'xmlns="http://www.w3.org/1999/xhtml"' in text
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme" in text
    marks = [e for e in root.iter() if e.tag.endswith("line") and e.get("class") == "mark"]
    assert marks
    for element in root.iter():
        assert not element.tag.endswith(("line", "rect")) or "nan" not in str(element.attrib)


@pytest.mark.parametrize(("num_requests", "num_blocks"), [("1", "3"), ("12", "20,200")])
def test_every_text_of_a_picture_is_in_it_and_covers_no_other(
    tmp_path: Path, num_requests: str, num_blocks: str
) -> None:
    """Letters are taken to be 7 wide and 12 high."""
    path = tmp_path / "page.html"
    argv = [*SMALL, "--num-requests", num_requests, "--num-blocks", num_blocks]
    assert main([*argv, "--html", str(path)]) == 0
    for picture in ET.fromstring(path.read_text("utf-8")).iter("{http://www.w3.org/1999/xhtml}svg"):
        _, _, width, height = map(int, picture.attrib["viewBox"].split())
        boxes: list[tuple[float, float, float, float]] = []
        for element in picture.iter("{http://www.w3.org/1999/xhtml}text"):
            length = 7 * len(element.text or "")
            shift = {"middle": length / 2, "end": length}.get(element.get("text-anchor", ""), 0)
            x, y = float(element.attrib["x"]) - shift, float(element.attrib["y"])
            assert x >= 0 and x + length <= width and y >= 10 and y + 2 <= height
            for left, right, top, bottom in boxes:
                assert x + length <= left or x >= right or y + 2 <= top or y - 10 >= bottom
            boxes.append((x, x + length, y - 10, y + 2))
        assert len(boxes) > 6


def test_two_runs_write_the_same_files(tmp_path: Path) -> None:
    for name in "ab":
        trace, html = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        assert main([*SMALL, "--trace", str(trace), "--html", str(html)]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("option", ["--trace", "--html"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    def make(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        raise ValueError("nothing may run")

    with pytest.raises(SystemExit) as caught:
        main([*SMALL, option, str(tmp_path / "no" / "file")], make)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert option in captured.err and "No such file or directory" in captured.err


@pytest.mark.parametrize("policy", ["greedy", "forecast"])
def test_one_block_less_than_the_sweep_finds_preempts(policy: Any) -> None:  # Any: a Literal.
    workload = Workload(
        num_requests=12, prompt=parse_lengths("3-9"), output=parse_lengths("5-30"), seed=4
    )
    load = draw_load(workload, 64)
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_steps_in_flight=2,
        admission_policy=policy,
    )

    def num_bad(num_blocks: int) -> int:
        setup = Setup(config=config, num_blocks=num_blocks, block_size=4, check_interval=0)
        result = simulate(load, setup)
        return result.stats.num_preemptions + result.num_cut_by_pool

    setup = Setup(config=config, num_blocks=1, block_size=4)
    sweep = find_smallest_pool(load, setup, Scheduler)
    assert num_bad(sweep.num_blocks) == 0
    assert num_bad(sweep.num_blocks - 1) > 0
    assert {num_blocks for num_blocks, *_ in sweep.tried} >= {
        sweep.num_blocks,
        sweep.num_blocks - 1,
    }


def test_a_sweep_prints_what_it_tried_and_runs_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--sweep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    answer = next(line for line in lines if line.startswith("smallest pool")).split()[-2]
    tried = [line.split() for line in lines if line.startswith("tried")]
    assert any(words[1] == answer and words[3] == "0" for words in tried)
    assert next(line for line in lines if line.startswith("blocks in the pool")).endswith(answer)
    assert next(line for line in lines if line.startswith("preemptions")).endswith(" 0")


@pytest.mark.parametrize("window", ["1", "3"])
def test_drafts_are_counted_the_same_with_and_without_checks(
    capsys: pytest.CaptureFixture[str], window: str
) -> None:
    argv = [*SMALL, "-k", "3", "--acceptance", "0.6", "--window", window]
    assert main(argv) == 0
    checked = capsys.readouterr().out
    accepted = next(line for line in checked.splitlines() if line.startswith("drafts accepted"))
    assert " 0 (" not in accepted
    assert main([*argv, "--check", "none"]) == 0
    assert capsys.readouterr().out == checked


def test_all_right_drafts_save_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample of 1 + 20 tokens: a first, then steps of 1 + 3."""
    argv = [*SMALL, "--num-requests=1", "--prompt-len=4", "--output-len=21", "--depth=1"]
    argv += ["-k", "3", "--acceptance", "1"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("steps  ")).split() == ["steps", "6"]


def test_pretended_time_is_steps_and_tokens_at_their_cost() -> None:
    load = draw_load(Workload(num_requests=3), 4096)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=4096)
    result = simulate(load, Setup(config=config, num_blocks=400, check_interval=0))
    starts = CostModel(us_per_step=7, us_per_token=2).starts_us(result.history)
    num_tokens = result.stats.num_prefill_tokens + result.stats.num_decode_tokens
    assert starts[0] == 0 and starts[-1] == 7 * result.history.num_steps + 2 * num_tokens
