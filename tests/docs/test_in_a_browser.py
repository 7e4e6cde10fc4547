"""The site as its readers open it: from a file, and on the narrow screen of a telephone."""

import importlib.util
import json
import random
import re
import shlex

import pytest

from mmm.errors import UserError
from mmm.parallel.pp.schedules import SCHEDULES
from mmm_lab.cli.plan import main
from support.pages import DOCS, SITE

pytestmark = pytest.mark.docs

# Types into the search field, and again until something has been found.
SEARCH = """
const toggle = document.getElementById("__search");
const input = document.querySelector("[data-md-component=search-query]");
toggle.checked = true;
toggle.dispatchEvent(new Event("change", { bubbles: true }));
setInterval(() => {
  const links = [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href);
  leave(links);
  if (links.length) return;
  input.focus();
  input.value = input.value === WORDS ? `${WORDS} ` : WORDS;
  input.dispatchEvent(new Event("keyup", { bubbles: true }));
}, 500);
"""
# Of each column of words: what begins it, and how many letters wide it is.
COLUMNS = """
const columns = [];
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  for (const [place, head] of [...table.rows[0].cells].entries()) {
    const texts = [...table.rows].map((row) => row.cells[place]?.textContent ?? "");
    const words = texts.filter((text) => /[a-z]{5}/.test(text));
    const style = getComputedStyle(head);
    const width = head.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (words.length) columns.push([words[0].slice(0, 30), width / (parseFloat(style.fontSize) / 2)]);
  }
}
leave(columns);
"""


@pytest.mark.parametrize(
    ("query", "page", "most"),
    [
        ("ulysses", "context-parallel.html", 30),
        ("out of memory", "memory.html", 3),
        ("accelerate", "coming-from.html", 3),
    ],
)
def test_the_search_works_from_a_file(opened, query, page, most):
    """The words of a newcomer lead to the page that is meant for them, among the first."""
    links = opened("index.html", f"const WORDS = {json.dumps(query)};{SEARCH}")
    assert any(page in link for link in links[:most]), links


@pytest.mark.parametrize("name", ["mistakes.html", "reference/flags.html"])
def test_no_column_of_words_is_a_letter_wide(opened, name):
    columns = opened(name, COLUMNS, width=400)
    assert columns
    narrow = [(text, round(letters, 1)) for text, letters in columns if letters < 5]
    assert not narrow


_SPEC = importlib.util.spec_from_file_location("planner_data", DOCS / "assets/planner_data.py")
page_data = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(page_data)

# The random questions that the page's planner and Python's are both asked.
SEED, QUESTIONS = 35, 50
TOLERANCE = 1e-6
# Run in the page, after its own scripts: what it shows for questions, and where its controls are moved.
ASK = """
const tried = [];
const read = (id) => document.getElementById(`planner-${id}`).textContent;
for (const question of QUESTIONS) {
  location.hash = "#" + new URLSearchParams(question);
  readAddress();
  show();
  tried.push({ figures: JSON.parse(read("json")), lines: read("lines").split("\\n\\n"), verdict: read("verdict") });
}
leave(tried);
"""
MOVE = """
const read = (id) => document.getElementById(`planner-${id}`).textContent;
const offers = () => [...document.querySelectorAll("#planner-offers button")];
const state = () => ({
  shown: read("shown"), verdict: read("verdict"), lines: read("lines"), hash: location.hash,
  grey: document.getElementById("planner-shown").classList.contains("last"),
  offers: offers().map((button) => button.textContent),
});
const tried = [state()];
const slider = document.getElementById("planner-tp");
const up = () => {
  slider.value = Number(slider.value) + 1;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  tried.push(state());
};
up();
up();
offers().at(-1).click();
tried.push(state());
for (const link of document.querySelectorAll("a[data-question]")) {
  link.click();
  tried.push(state());
}
location.hash = "#seq=1e300&batch=1e15&pp=10000000&tp=-1&cp=<b>&stages=NaN&model=__proto__&machine=toString&schedule=";
readAddress();
show();
tried.push(state());
leave(tried);
"""


def questions():
    """Random ones, most of them with sizes that go together; some do not."""
    draw = random.Random(SEED)
    data = page_data.data()

    def rarely():
        return draw.random() < 0.04

    for _ in range(QUESTIONS):
        model = draw.choice(list(data["models"]))
        machine = draw.choice(list(data["machines"]))
        hosts = draw.choice((1, 2, 4, 8, 12, 16, 64))
        devices = data["machines"][machine]["ranks_per_host"]
        left, sizes = hosts * devices, {}
        for axis in draw.sample(("pp", "cp", "tp", "dp_replicate"), 4):
            fitting = [n for n in (1, 1, 1, 2, 2, 3, 4, 8) if left % n == 0 or rarely()]
            sizes[axis] = draw.choice(fitting) if axis != "dp_replicate" or draw.random() < 0.3 else 1
            left = max(left // sizes[axis], 1)
        axes = sizes["pp"] * sizes["cp"] * sizes["tp"]
        schedule = draw.choice(list(SCHEDULES))
        splits = sizes["pp"] > 1 and SCHEDULES[schedule].splits and not rarely()
        microbatches = 2 * sizes["pp"] if sizes["pp"] > 1 and not rarely() else draw.choice((1, 2, 4))
        alone = ("fsdp", "ddp") if axes == 1 or rarely() else ("fsdp",)
        yield {
            **sizes,
            "model": model,
            "machine": machine,
            "hosts": hosts,
            "devices": devices,
            "cp_style": draw.choice(("ring", "ulysses")),
            "schedule": schedule,
            "stages": draw.choice((2, 3)) if SCHEDULES[schedule].max_stages is None else SCHEDULES[schedule].min_stages,
            "ep": draw.choice([n for n in (1, 2, 4) if left % n == 0])
            if data["models"][model]["n_experts"] or rarely()
            else 1,
            "parallel": "hsdp" if sizes["dp_replicate"] > 1 else draw.choice((*alone, *alone, "zero1", "zero2")),
            "seq": draw.choice((2048, 8192, 32768)) if axes > 1 else draw.choice((512, 2048, 3000)),
            "batch": microbatches * draw.choice((1, 2, 3)) * left * sizes["dp_replicate"] + rarely(),
            "microbatches": microbatches,
            "checkpointing": draw.choice(("none", "full") if splits else ("none", "selective", "full")),
        }


def planned(line, folder, capsys):
    """What a line of `mmm plan` writes as JSON, prints last, and ends with."""
    program, subcommand, *argv = shlex.split(line)
    assert (program, subcommand) == ("mmm", "plan")
    file = folder / "plan.json"
    file.unlink(missing_ok=True)
    error = ""
    try:
        main([*argv, "--json", str(file)])
    except UserError as raised:
        error = str(raised)
    (entry,) = json.loads(file.read_text()) or [None]
    return entry, capsys.readouterr().out.rstrip().rpartition("\n")[2], error


def near(shown, expected):
    return shown == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.docs
def test_figures_are_those_of_the_command(opened, tmp_path, capsys):
    asked = list(questions())
    answers = opened("guide/planner.html", f"const QUESTIONS = {json.dumps(asked)};{ASK}")
    refused = pipelines = 0
    for question, answer in zip(asked, answers, strict=True):
        figures = answer["figures"]
        line = answer["lines"][0]
        entry, printed, error = planned(line, tmp_path, capsys)
        if entry is None:
            assert figures["why"], (line, error)
            # The command says all rules that are broken.
            assert figures["why"] in error, (line, error)
            assert figures["why"] in answer["verdict"]
            refused += 1
            continue
        assert not figures["why"], (line, figures)
        assert figures["fits"] == entry["fits"] == (not error), (line, error)
        # Those of the command are whole bytes.
        assert figures["memory"] == pytest.approx(entry["memory_bytes"], rel=TOLERANCE, abs=1), line
        assert figures["moments"].keys() == entry["memory_by_moment"].keys()
        for moment, memory in entry["memory_by_moment"].items():
            assert near(figures["moments"][moment], memory), (line, moment)
        for shown, name in (
            ("sent", "sent_bytes"),
            ("waits", "wait_seconds"),
            ("bubble", "bubble"),
            ("seconds", "step_seconds"),
            ("compute", "compute_seconds"),
            ("optimizer", "optimizer_seconds"),
            ("tokensPerSecond", "tokens_per_second"),
            ("mfu", "mfu"),
        ):
            assert near(figures[shown], entry[name]), (line, name)
        if entry["fits"]:
            assert answer["lines"][1] == printed
        pipelines += question["pp"] > 1
    assert 5 <= refused <= QUESTIONS / 2
    assert pipelines >= 10


@pytest.mark.docs
def test_a_slider_changes_what_is_shown(opened):
    address = "#model=llama-8b&machine=polaris&hosts=8&devices=4&tp=1&batch=64&microbatches=1"
    before, after, odd, offered, *linked, hostile = opened("guide/planner.html", MOVE, address=address)
    assert "llama-8b as dp32 on 32 devices of polaris" in before["verdict"]
    assert "llama-8b as dp16·tp2 on 32 devices of polaris" in after["verdict"]
    assert before["shown"] != after["shown"]
    # 32 devices are no multiple of 3: the last picture stays, and the sizes beside it are offered.
    assert odd["verdict"].startswith("No layout of llama-8b")
    assert (odd["shown"], odd["grey"], odd["offers"]) == (after["shown"], True, ["tp 2", "tp 4"])
    assert "llama-8b as dp8·tp4 on 32 devices of polaris" in offered["verdict"]
    assert (offered["grey"], offered["offers"]) == (False, [])
    assert "tp=1&" in before["hash"]
    assert "tp=2&" in after["hash"]
    assert " --tp 2 " in after["lines"]
    for phrase in ("parameters", "between hosts", "waits for tp"):
        assert phrase in after["shown"]
    assert len({state["hash"] for state in linked}) == len(linked) >= 5
    for state in linked:
        assert re.match(r"llama-.* (fits|does not fit): ", state["verdict"]), state
    assert hostile["verdict"] == linked[-1]["verdict"]


def test_the_data_are_of_this_code():
    assert page_data.script() in (SITE / "guide/planner.html").read_text(encoding="utf-8")
