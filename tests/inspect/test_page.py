"""The HTML page: what it holds, and how it behaves in a real browser (Chromium through selenium, where installed)."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from fxpasses.base.sample import Sample
from fxpasses.inspect.codec import read, write
from fxpasses.inspect.html import page, page_data
from fxpasses.inspect.model import CAPTURED, Graph, Partition, Run, Saved, Source, Stage, Step
from fxpasses.report import MemoryPlan, Report, Transfer
from tests.inspect.programs import recorded
from tests.inspect.stages import call, given, ref, result, stage
from tests.inspect.test_changes_random import large

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def run_of(before: Stage, after: Stage) -> Run:
    after.name = "hoist_metadata"
    return Run(program=HOSTILE, graphs=[Graph("0/0", 0, 0, HOSTILE, stages=[before, after])])


def hostile() -> Run:
    source = Source(HOSTILE, 1, HOSTILE, HOSTILE)
    nodes = [given("x"), call("a", HOSTILE, ref("x"), HOSTILE, module=HOSTILE), result("a")]
    nodes[1].source = source
    return run_of(stage(*nodes), stage(nodes[0], result("x")))


def test_what_is_in_a_record_is_never_markup():
    text = page(hostile())
    assert text.count("</script>") == 2 and "<img" not in text
    data = re.search(r'<script type="application/json" id="record">(.*?)</script>', text, flags=re.DOTALL)
    assert data is not None and json.loads(data[1])["program"] == HOSTILE


def test_the_page_asks_for_nothing_outside_itself():
    text = page(recorded())
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}  # a name, and no address


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in programs.values():
        pytest.skip("needs Debian's chromium and chromium-driver, which are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,900",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a record's page from disk; the test fails if the browser's console has anything to say at its end."""

    def show(run: Run):
        file = tmp_path / "page.html"
        file.write_text(page(run), encoding="utf-8")
        browser.get(file.as_uri())
        return browser

    yield show
    assert browser.get_log("browser") == []


def press(browser, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def text_of(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def count(browser, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def eventually(condition) -> bool:
    for _ in range(100):
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_it_opens_and_says_what_happened(opened):
    browser = opened(recorded())
    said = text_of(browser, "#changes")
    assert "3 host reads became 1" in said and "layers 0–2: the same changes ×3" in said
    assert "mask[:, : lengths.max().item()] = 1" in said


@pytest.mark.slow
def test_it_begins_with_pictures(opened):
    run = recorded()
    run.sample = Sample([[1, 3, 0, 4, 2, 1], [0, 8]], 2, 8, 8, [[0, 4, 0, 4, 3], [4, 8, 4, 8, 0]])
    run.graphs[0].before, run.graphs[0].after = Step(9, 9, 70, 30, [0, 70, 30, 5], 2), Step(8, 8, 40, 20, [0, 40, 5], 2)
    browser = opened(run)
    assert count(browser, "#texts rect") == 4 and count(browser, "#tiles polygon, #tiles rect") == 2
    labels = [
        browser.execute_script(f"return document.querySelector('#{name} svg').ariaLabel")
        for name in ("texts", "tiles", "step")
    ]
    assert labels == [
        "2 texts: 75 % labelled, 19 % read, 6 % unread",
        "2 tiles, 41 % of the pairs",
        "peak 70 B before, 40 B after",
    ]
    press(browser, "4")
    assert count(browser, "#step path") == 2


@pytest.mark.slow
def test_hostile_names_stay_names(opened):
    browser = opened(hostile())
    for key in "123456o":
        press(browser, key)
    assert browser.title == "fxpasses record" and count(browser, "img") == 0


@pytest.mark.slow
def test_keys_walk_through_the_changes(opened):
    browser = opened(recorded())
    press(browser, "2", "n")
    first = text_of(browser, '.row[aria-selected="true"]')
    press(browser, "n")
    second = text_of(browser, '.row[aria-selected="true"]')
    assert first and second and first != second
    press(browser, "p")
    assert text_of(browser, '.row[aria-selected="true"]') == first
    assert "float32[8, 8]" in text_of(browser, "#detail") and "not there before" in text_of(browser, "#detail")


@pytest.mark.slow
def test_search_filter_and_escape(opened):
    browser = opened(recorded())
    press(browser, "2")
    everything = text_of(browser, "#count")
    press(browser, "/", *"operator.matmul wrap_body_1")
    assert eventually(lambda: text_of(browser, "#count").startswith("1 of"))
    press(browser, "\ue00c")  # Escape
    assert eventually(lambda: text_of(browser, "#count") == everything)
    browser.find_element("css selector", "#changed-only").click()
    assert count(browser, ".row") == count(browser, ".row .kind") > 0
    for kind in ("prologue", "added"):
        browser.find_element("css selector", f'input[data-kind="{kind}"]').click()
    assert count(browser, ".row.prologue") == count(browser, ".row.added") == 0 < count(browser, ".row.rewired")


@pytest.mark.slow
def test_sections_fold_and_a_change_leads_to_its_node(opened):
    browser = opened(recorded())
    rows = count(browser, "details[open] tbody tr")
    browser.find_element("css selector", "#changes > details > summary").click()
    assert count(browser, "details[open] tbody tr") < rows
    browser.find_element("css selector", "details[open] tbody tr").click()
    assert text_of(browser, '.row[aria-selected="true"]') and text_of(browser, "#detail")


@pytest.mark.slow
def test_light_and_dark(opened):
    browser = opened(recorded())
    background = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(background)
    press(browser, "t")
    assert browser.execute_script(background) != before


@pytest.mark.slow
def test_a_narrow_window_cuts_nothing_off(opened):
    browser = opened(recorded())
    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for key in "123456":
            press(browser, key)
            wide = "return [...document.querySelectorAll('.scroll, body')].some((e) => e.scrollWidth > e.clientWidth)"
            assert not browser.execute_script(wide), key
        press(browser, "1")
        shown = "return getComputedStyle(document.getElementById('side')).display !== 'none'"
        assert not browser.execute_script(shown)
        browser.find_element("css selector", "#filters").click()
        assert browser.execute_script(shown) and count(browser, "#side input[type=checkbox]") == 7
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_twenty_thousand_nodes_stay_responsive(opened):
    before, after = large(5000), large(5000, removed="a")
    browser = opened(run_of(before, Stage(CAPTURED, after.regions)))
    started = time.perf_counter()
    press(browser, "2", "n", "\ue010")  # End
    assert eventually(lambda: "return (c4999,)" in text_of(browser, '.row[aria-selected="true"]'))
    press(browser, "/", *"layers.4321")
    assert eventually(lambda: text_of(browser, "#count").startswith("4 of"))
    assert time.perf_counter() - started < 20  # about 2 s on one core; the machine may be busy
    assert count(browser, ".row") < 200


def with_transfers() -> Run:
    """Four layers of 8 nodes; each layer's activation leaves, and comes back under the layer after it."""
    mib, layers = 1 << 20, 4
    saved = [
        Saved(f"act_{i}", 4 * mib, False, 8 * i + 1, 8 * (layers - 1 - i), 8 * (layers - i) - 1, f"model.py:{i}")
        for i in range(layers)
    ]
    moved = [Transfer(one.name, 4 * mib, one.made_at, max(0, one.needed_at - 8), one.needed_at) for one in saved[:-1]]
    run = run_of(stage(given("x"), result("x")), stage(given("x"), result("x")))
    run.graphs[0].partition = Partition([0, 5 * mib] * 16, [0, 10 * mib] * 16, saved)
    run.graphs[0].stages[1].report = Report("offload_activations", transfers=moved)
    return run


def test_transfers_are_written_and_read(tmp_path):
    write(with_transfers(), tmp_path / "record.jsonl")
    assert read(tmp_path / "record.jsonl") == with_transfers()
    data = page_data(with_transfers())["graphs"][0]
    assert [one["name"] for one in data["transfers"]] == ["act_0", "act_1", "act_2"]
    assert ["saved for backward, on the device", "16.0 MiB", "4.0 MiB", ""] in data["rows"]
    assert ["moved off the device and back", "0 B", "12.0 MiB", ""] in data["rows"]


def planned() -> Run:
    """A step of two calls and their backward, with a plan."""
    run = run_of(stage(given("x"), result("x")), stage(given("x"), result("x")))
    plan = MemoryPlan(60 << 20, [20 << 20, 40 << 20, 80 << 20, 50 << 20], [20 << 20, 30 << 20, 55 << 20, 50 << 20])
    run.graphs[0].stages[1].report = Report("memory", plan=plan)
    return run


def test_a_plan_of_memory_is_written_and_read(tmp_path):
    write(planned(), tmp_path / "record.jsonl")
    assert read(tmp_path / "record.jsonl") == planned()
    assert page_data(planned())["graphs"][0]["plan"]["budget"] == 60 << 20
    assert page_data(padded())["graphs"][0]["plan"] is None


@pytest.mark.slow
def test_a_plan_of_memory_is_drawn(opened):
    browser = opened(planned())
    press(browser, "4")
    assert text_of(browser, "#plan figcaption") == (
        "Memory of a step in 60.0 MiB: 80.0 MiB if all is saved (grey), 55.0 MiB as planned (blue)"
    )
    assert count(browser, "#plan path") == 2 and count(browser, "#plan .budget") == 1


def padded() -> Run:
    run = recorded()
    run.rows = {"steps": 2.0, "live": 0.76, "dead": 1.0}
    return run


def test_what_was_computed_of_the_batches_is_said():
    assert page_data(padded())["said"][1:] == ["rows: 38 % can reach the loss; 50 % padding, 12 % prompts"]


@pytest.mark.slow
def test_the_overview_says_what_was_computed_of_the_batches(opened):
    browser = opened(padded())
    press(browser, "o")
    assert text_of(browser, ".said + .said") == "rows: 38 % can reach the loss; 50 % padding, 12 % prompts"


@pytest.mark.slow
def test_what_is_kept_and_transferred_is_drawn(opened):
    browser = opened(with_transfers())
    press(browser, "4")
    assert count(browser, "#transfers .reload") == count(browser, "#transfers .away") == 3
    assert count(browser, "#transfers .work") == 32 and count(browser, "#kept path") == 2
    highest = "return Math.min(...[...document.querySelectorAll(arguments[0])].map((p) => p.getBBox().y))"
    assert browser.execute_script(highest, "#kept .after") > browser.execute_script(highest, "#kept .before")
    # 8 nodes of backward, four of which compute, run while a copy comes back.
    assert "act_0\tmodel.py:0\t4.0 MiB\thost\t8\t41,943,040" in text_of(browser, "#body")
