"""Slices of many ranks become one trace, whose arrows join what belongs together."""

import json

import pytest

from mmm.profile import trace_picture
from mmm.profile.rank_trace import CALLS, STEPS, RankTrace, Slice
from mmm.profile.trace_file import TraceFile, read_trace
from mmm.profile.trace_picture import draw_trace
from support.traces import check_for_perfetto, flows

ZERO = 1_790_000_000_000_000_000  # ns since 1970
MS = 1_000_000


def call(kind, begin, end, key="", ranks=(), sends=False, track=CALLS):
    return Slice(track, kind, kind, ZERO + begin * MS, ZERO + end * MS, key, ranks, sends)


def step(begin, end):
    return [Slice(STEPS, "step", "step 4", ZERO + begin * MS, ZERO + end * MS), call("dtf", begin, end, track=STEPS)]


def written(path, traces, ranks=None):
    file = TraceFile(path, [trace.rank for trace in traces] if ranks is None else ranks, ZERO)
    for trace in traces:
        file.add(trace)
    joined = file.close(layout="dp2")
    if path.suffix == ".json":
        return joined, json.loads(path.read_text())
    return joined, None


def two(*slices0, slices1=(), offset=0):
    return [
        RankTrace(0, "rank 0 · dp0 on a", [*step(0, 100), *slices0]),
        RankTrace(1, "rank 1 · dp1 on b", [*step(0, 100), *slices1], offset=offset),
    ]


def test_a_collective_is_joined_from_the_first_to_the_last(tmp_path):
    one, late = (
        call("collective", 10, 12, "g 1 all_reduce", (0, 1)),
        call("collective", 30, 32, "g 1 all_reduce", (0, 1)),
    )
    joined, trace = written(tmp_path / "trace.json", two(late, slices1=[one]))
    assert joined == (1, 0, 0, 0)
    ((start, finish),) = flows(trace).values()
    assert (start["pid"], start["ts"], finish["pid"], finish["ts"]) == (1, 11_000, 0, 31_000)
    check_for_perfetto(trace)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0 · dp0", 1: "rank 1 · dp1"}


def test_clocks_are_aligned(tmp_path):
    """Rank 1's clock is 5 s behind: what it received would be before it was sent."""
    sent = call("send", 10, 11, "g (0, 1) 0 1", (0, 1), True)
    received = call("wait", 5 - 5000, 12 - 5000, "g (0, 1) 0 1", (0, 1))
    joined, trace = written(tmp_path / "trace.json", two(sent, slices1=[received], offset=5000 * MS))
    assert joined == (0, 1, 0, 0)
    ((start, finish),) = flows(trace).values()
    assert (start["pid"], finish["pid"]) == (0, 1)
    assert start["ts"] == pytest.approx(10_000, abs=1)
    assert finish["ts"] == pytest.approx(12_000, abs=1.1)
    assert finish["ts"] < 12_000
    check_for_perfetto(trace)
    joined, trace = written(tmp_path / "trace.json", two(sent, slices1=[received]))
    assert joined == (0, 0, 0, 1)
    assert not flows(trace)


def test_what_has_no_other_end_has_no_arrow(tmp_path):
    alone = call("collective", 1, 2, "g 1 all_reduce", (0, 1))
    joined, trace = written(tmp_path / "trace.json", two(alone))
    assert joined == (0, 0, 1, 0)
    assert not flows(trace)
    joined, _ = written(tmp_path / "trace.json", two(alone)[:1])  # the other rank is not in the trace
    assert joined == (0, 0, 0, 0)


def test_pytorchs_events_keep_their_arrows_and_threads(tmp_path):
    def events(pid):
        place = {"pid": pid, "tid": pid}
        return [
            {"ph": "M", "name": "thread_name", **place, "ts": 0, "args": {"name": "thread 7 (python)"}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mul", **place, "ts": 5.0, "dur": 2.0, "args": {}},
            {"ph": "X", "cat": "kernel", "name": "mul", "pid": 0, "tid": 9, "ts": 6.0, "dur": 2.0, "args": {}},
            {"ph": "X", "cat": "user_annotation", "name": "gloo:send", **place, "ts": 6.5, "dur": 9.0, "args": {}},
            {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", **place, "ts": 5.0},
            {"ph": "f", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 9, "ts": 6.0, "bp": "e"},
            {"ph": "s", "id": 4, "cat": "fwdbwd", "name": "fwdbwd", **place, "ts": 5.0},
            {
                "ph": "X",
                "cat": "Trace",
                "name": "PyTorch Profiler (0)",
                "pid": "Spans",
                "tid": "x",
                "ts": 0.0,
                "dur": 9.0,
            },
        ]

    traces = two()
    for trace in traces:
        trace.events, trace.base = events(70 + trace.rank), ZERO + MS
    _, trace = written(tmp_path / "trace.json", traces)
    check_for_perfetto(trace)
    assert len(flows(trace)) == 2  # one a rank, of its own; the one without an end is left out
    muls = [event for event in trace["traceEvents"] if event["name"] == "aten::mul"]
    assert [(event["pid"], event["ts"]) for event in muls] == [(0, 1005.0), (1, 1005.0)]
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [threads[event["tid"]] for event in muls] == ["main thread"] * 2
    sends = [event for event in trace["traceEvents"] if event["name"] == "gloo:send"]  # begins in the product
    assert [threads[event["tid"]] for event in sends] == ["main thread, asynchronous"] * 2


def test_the_picture_and_its_reader(tmp_path):
    both = [call("collective", 10 * n, 10 * n + 2, f"g {n} all_reduce", (0, 1)) for n in range(1, 5)]
    path = tmp_path / "trace.json.gz"
    joined, _ = written(path, two(*both, slices1=both))
    assert joined.collectives == 4
    assert sum(event["ph"] == "s" for event in read_trace(path)) == 4
    assert draw_trace(path, tmp_path / "trace.png").stat().st_size > 10_000
    rows, arrows = trace_picture._read(path)
    few = {0: rows[0]}
    titles = [trace_picture._figure(shown, arrows, 2).axes[0].get_title() for shown in (rows, few)]
    assert ["the first 1 of 2 ranks" in title for title in titles] == [False, True]
    written(path, [RankTrace(0, "rank 0")])
    with pytest.raises(ValueError, match="no step"):
        draw_trace(path, tmp_path / "none.png")
