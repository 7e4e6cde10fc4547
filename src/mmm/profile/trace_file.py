"""One trace of many ranks, as JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a rank: pid = rank, named ``rank 3 · pp1 tp1``, its host as a label. Its threads are tracks:
the parts of the steps, the calls to process groups, and PyTorch's own of the host's threads and the device's streams.
Times are µs by rank 0's clock. An arrow (a flow) joins what belongs together: from the rank that called a collective
first, by the others, to the one that called it last; from a send to the end of the wait for its receive.

Source: "Trace Event Format", Google, 2016. What Perfetto's importer asks for: ``ts`` and ``dur`` in µs, slices of a
thread inside each other or apart, a thread's number used once, a flow's parts in time order, each inside a slice of its
thread (``bp: "e"``), and its id with category and name used once.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmm.profile.rank_trace import CALLS, STEPS, RankTrace

TRACKS = 10_000  # of a rank: its threads are numbered rank · TRACKS + 1, …
FLOWS = 10**9  # of a rank, PyTorch's own arrows inside it
OURS = "mmm"  # the category of our own slices and arrows


class Joined(NamedTuple):
    """How many arrows; and how many calls have none: a rank's part is missing, or was received before it was sent."""

    collectives: int
    transfers: int
    missing: int
    backwards: int


class _End(NamedTuple):
    at: float  # µs
    pid: int
    tid: int
    sends: bool
    expected: int


class TraceFile:
    """A trace that is written rank by rank, of which one at a time is in memory.

    Args:
        path: ends in .json or .json.gz. ranks: whose traces come. zero: of the trace's time, ns since 1970 by rank 0's
            clock.
    """

    def __init__(self, path: Path, ranks: Sequence[int], zero: int) -> None:
        self.ranks, self.zero = set(ranks), zero
        self._ends: dict[str, list[_End]] = {}
        self._clocks: dict[str, dict[str, float]] = {}
        self._file: Any = _open(path, "wt")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._first = True

    def add(self, trace: RankTrace) -> None:
        """A rank's slices and events. Each rank comes once."""
        pid, tracks = trace.rank, dict[Any, int]()
        host = trace.label.partition(" on ")
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": host[0]}})
        self._write({"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": host[2]}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        self._clocks[f"rank {pid}"] = {"offset_us": trace.offset / 1e3, "error_us": trace.error / 1e3}
        order = [STEPS, CALLS]  # the first tracks
        for span in sorted(trace.slices, key=lambda s: (s.begin, -s.end)):
            tid = self._track(tracks, pid, span.track, span.track, order)
            begin, end = self._at(span.begin, trace), self._at(span.end, trace)
            duration = round(end - begin, 3)
            self._write(
                {
                    "ph": "X",
                    "cat": f"{OURS},{span.kind}",
                    "name": span.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": begin,
                    "dur": duration,
                }
            )
            if span.key:
                # A send is over when it pleases, but data does not arrive before it began.
                inside = min(duration * 0.01, 1.0)
                time_us = begin + (
                    inside if span.sends else duration / 2 if span.kind == "collective" else duration - inside
                )
                expected = len(self.ranks.intersection(span.ranks))
                self._ends.setdefault(span.key, []).append(_End(time_us, pid, tid, span.sends, expected))
        for lane, name, event in _pytorchs(trace.events):
            tid = self._track(tracks, pid, (event["pid"], event["tid"], lane), name, order)
            time_us = round((trace.base + trace.offset - self.zero) / 1e3 + event["ts"], 3)
            own_id = {"id": (pid + 1) * FLOWS + event["id"]} if "id" in event else {}
            self._write({**event, "pid": pid, "tid": tid, "ts": time_us, **own_id})

    def close(self, **about: Any) -> Joined:
        """Write the arrows, and what there is to say `about` the trace."""
        collectives = transfers = missing = backwards = 0
        for flow_id, (key, ends) in enumerate(self._ends.items(), start=1):
            if ends[0].expected < 2:
                continue  # its other ranks are not in the trace
            if len(ends) != ends[0].expected:
                missing += 1
                continue
            ordered = sorted(ends)
            sender = any(end.sends for end in ends)
            if sender and not ordered[0].sends:
                backwards += 1
                continue
            transfers, collectives = transfers + sender, collectives + (not sender)
            for place, end in enumerate(ordered):
                ph = "s" if place == 0 else "f" if place == len(ends) - 1 else "t"
                name = "send" if sender else "collective"
                event = {"ph": ph, "cat": OURS, "name": name, "id": flow_id, "pid": end.pid, "tid": end.tid}
                args = {} if place else {"args": {"key": key}}  # chrome://tracing complains of what is said twice
                self._write(event | {"ts": round(end.at, 4), "bp": "e"} | args)
        joined = Joined(collectives, transfers, missing, backwards)
        self._file.write("\n], " + json.dumps({"otherData": {**about, "clocks": self._clocks, **joined._asdict()}})[1:])
        self._file.close()
        return joined

    def _at(self, ns: int, trace: RankTrace) -> float:
        return (ns + trace.offset - self.zero) / 1e3

    def _track(self, tracks: dict[Any, int], pid: int, key: Any, name: str, order: list[str]) -> int:
        if key not in tracks:
            tracks[key] = pid * TRACKS + (order.index(key) if key in order else len(order) + len(tracks)) + 1
            about = {"pid": pid, "tid": tracks[key]}
            self._write({"ph": "M", "name": "thread_name", **about, "args": {"name": name}})
            index = tracks[key] % TRACKS
            self._write({"ph": "M", "name": "thread_sort_index", **about, "args": {"sort_index": index}})
        return tracks[key]

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False


def _pytorchs(events: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Slices of PyTorch's trace, in order, and its arrows that have both ends; each with lane and name of its track.

    A slice that neither lies in the one under way nor follows it, such as a send that another call ends, would be lost
    in Perfetto: it gets a lane of its own.
    """
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    names |= {place: "main thread" for place in names if place[0] == place[1]}
    ends = Counter((e["cat"], e["id"], e["ph"]) for e in events if e["ph"] in "sf")
    lanes: dict[tuple[int, int], list[list[float]]] = {}  # by thread, of each lane the ends of what is under way
    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
        place, lane = (event["pid"], event["tid"]), 0
        name = names.get(place, f"thread {place[1]}")
        if event["ph"] == "X" and isinstance(place[0], int) and isinstance(place[1], int):
            begin, end = event["ts"], round(event["ts"] + event["dur"], 3)
            own = lanes.setdefault(place, [])
            for stack in own:
                while stack and stack[-1] <= begin:
                    stack.pop()
            lane = next((n for n, stack in enumerate(own) if not stack or end <= stack[-1]), len(own))
            own += [[]] if lane == len(own) else []
            own[lane].append(end)
            yield lane, f"{name}, asynchronous" if lane else name, event
        elif event["ph"] in "sf" and all(ends[event["cat"], event["id"], ph] == 1 for ph in "sf"):
            yield 0, name, event


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """Our own events of a trace file, and the names of processes and threads, without holding all others in memory."""
    with _open(path, "rt") as file:
        for line in file:
            if line.startswith(('{"ph":"M"', '{"ph":"X","cat":"mmm')) or f'"cat":"{OURS}"' in line:
                yield json.loads(line.rstrip(",\n"))


def _open(path: Path, mode: str) -> Any:
    return gzip.open(path, mode, compresslevel=6) if path.suffix == ".gz" else open(path, mode)
