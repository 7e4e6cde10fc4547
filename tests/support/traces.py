"""What a trace in the Trace Event Format has to be for Perfetto."""


def flows(trace):
    found = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            found.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    return found


def check_for_perfetto(trace):
    """What its importer of the JSON format needs."""
    stacks, slices = {}, {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXstf"
        assert type(event["pid"]) is int
        if event["ph"] == "M" and event["name"].startswith("process"):
            continue
        assert type(event["tid"]) is int
        assert event["tid"] > 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], -event["dur"], event["ts"] + event["dur"])
            )
    assert len({tid for _, tid in slices}) == len(slices), "a thread's number stands for one thread"
    for place, own in slices.items():
        for begin, _, end in sorted(own):
            stack = stacks.setdefault(place, [])
            while stack and stack[-1] <= begin + 0.0015:  # ns are rounded
                stack.pop()
            assert not stack or end <= stack[-1] + 0.0015, "slices of a thread lie in each other, or apart"
            stack.append(end)
    for key, parts in flows(trace).items():
        assert [part["ph"] for part in parts] == ["s", *"t" * (len(parts) - 2), "f"], key
        assert parts == sorted(parts, key=lambda part: part["ts"]), key
        assert parts[-1]["bp"] == "e"
        for part in parts:
            inside = slices[part["pid"], part["tid"]]
            assert any(begin <= part["ts"] <= end for begin, _, end in inside), key
