"""The dashboard in a real browser, on a live run, on a finished one and in an exported file."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.launched import run_tidemill
from tests.page.browser import Reader, open_browser, reading
from tests.page.live_run import HOSTILE, RUN, SECRET, LiveRun, dashboard
from tests.waits import poll
from tidemill.bus.client.addresses import KeptPort
from tidemill.launch.page.feed import REPEATED

PAGES = ("overview", "flow", "learning", "fleet", "samples", "sample=1", "batch=2", "setup")
CANVASES = {"overview": 1, "flow": 1, "learning": 8, "fleet": 1, "batch=2": 1}
"""Least number of drawn canvases."""
DRAWN = """[...document.querySelectorAll('main canvas')].filter(canvas => canvas.width &&
  canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte)).length"""
STEPS_OF = """name => document.querySelector(`section[aria-label="${name}"] canvas`)
  ?.chart.lines[0].points.map(point => point[0])"""
TEN_MB = 10_000_000
RENDERER = """export async function render(sample, host, el) {
  const elsewhere = `http://localhost:${location.port}/api/run`;
  const refused = await fetch(elsewhere, { mode: "no-cors" }).then(() => "sent", () => "refused");
  host.append(el("b.board", {}, `board of ${sample.reward}, request ${refused}`));
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def live(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    with LiveRun(tmp_path_factory.mktemp("live")) as run:
        run.advance(5)
        yield run


@pytest.fixture(scope="module")
def address(live: LiveRun) -> Iterator[str]:
    with dashboard(live) as served:
        yield served


def look_at_all(reader: Reader, folder: Path, width: int) -> None:
    """Show each page: drawn, labelled, no wider than the screen."""
    for name in PAGES:
        reader.show(name)
        reader.wait(f"least => {DRAWN} >= least", CANVASES.get(name, 0))
        text = reader.page.inner_text("main")
        assert len(text) > 20 and "undefined" not in text and "NaN" not in text, f"{name}: {text[:500]}"
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
        unnamed = "[...document.querySelectorAll('canvas:not([aria-label]), main input:not([aria-label])')]"
        assert reader.page.evaluate(f"{unnamed}.filter(item => !item.closest('label')).length") == 0, name
        reader.page.screenshot(path=folder / f"{name.partition('=')[0]}.png", full_page=True)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_every_page_of_a_live_run(address: str, browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    with reading(browser, address, width=width, scheme=scheme) as reader:
        look_at_all(reader, tmp_path, width)


def test_an_open_page_follows_the_run(address: str, live: LiveRun, browser: Any) -> None:
    with reading(browser, address) as reader:
        reader.show("learning")
        step = live.advance(2)
        reader.wait_step(step)
        reader.wait(f"step => ({STEPS_OF})('train/entropy')?.at(-1) === step", step)
        assert reader.page.evaluate(STEPS_OF, "train/entropy") == list(range(1, step + 1))
        reader.show("overview")
        before = reader.page.inner_text(".facts")
        step = live.advance(2)
        reader.wait(f"step => ({STEPS_OF})('Reward')?.at(-1) === step", step)
        reader.wait("before => document.querySelector('.facts').innerText !== before", before)
        reader.show("fleet")
        reader.wait("() => /v0, [0-9]+ behind/.test(document.querySelector('[aria-label=Now]').textContent)")
        stored = "Number([...document.querySelectorAll('.fact dd')][2].textContent.replace(',', ''))"
        before = reader.page.evaluate(stored)
        live.publish(4_000, 0)
        reader.wait(f"before => {stored} > before", before)


def test_what_a_first_chart_waits_for(address: str, browser: Any) -> None:
    """Nothing but the page's files, its run, and its data."""
    needs = {"overview": {"overview"}, "learning": {"metrics", "lags", "series"}, "fleet": {"fleet"}}
    for name, answers in needs.items():
        with reading(browser, address) as reader:
            reader.page.goto("about:blank")
            paths: list[str] = []
            reader.page.on("request", lambda request, paths=paths: paths.append(urlsplit(request.url).path))
            reader.page.goto(f"{reader.base}#{name}")
            reader.wait(f"() => {DRAWN} > 0")
            files = ["/", "/static/app.css", "/static/app.js"]
            needed = {*files, "/events", "/api/run", *(f"/api/{answer}" for answer in answers)}
            late = {"/api/runs", "/static/icon.svg"}
            assert needed <= set(paths) <= needed | late


def test_events_of_the_time_before_a_connection_are_not_asked_for(address: str, live: LiveRun, browser: Any) -> None:
    """The stream of events opens behind the first answers, and a step is trained in between."""
    with reading(browser, address) as reader:
        reader.page.goto("about:blank")
        held: list[Any] = []
        asked: list[str] = []
        reader.page.route("**/events", lambda route: held.append(route))
        reader.page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        reader.page.goto(f"{reader.base}#overview")
        reader.wait(f"() => {DRAWN} > 0")

        def run() -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(urlopen(f"{reader.base}api/run").read())
            return answer

        answered_at, step = run()["at"], live.advance(1)
        poll(lambda: run()["step"] == step)
        held[0].continue_()
        reader.wait_step(step)
        assert reader.page.evaluate(STEPS_OF, "Reward") == list(range(1, step + 1))
        is_late = run()["at"] - answered_at >= REPEATED  # on a busy machine: the page asks for everything once more
        assert is_late or sorted(path for path in asked if "/api/" in path) == ["/api/overview", "/api/run"]


def test_a_page_that_fails_says_so_and_events_go_on(address: str, live: LiveRun, browser: Any) -> None:
    with reading(browser, address) as reader:
        reader.expected = re.compile("TypeError")
        reader.page.route("**/api/flow", lambda route: route.fulfill(json={}))
        reader.show("flow")
        assert reader.page.query_selector("main .badly[role=alert]") is not None
        reader.wait_step(live.advance(1))


def test_a_restarted_bus_leaves_no_gap_and_no_double(address: str, live: LiveRun, browser: Any) -> None:
    with reading(browser, address) as reader:
        reader.expected = re.compile("503")  # Answers without a bus
        reader.show("learning")
        reader.wait(f"() => ({STEPS_OF})('train/entropy')?.length > 1")
        live.server.kill()
        reader.wait("() => !document.querySelector('.alert').hidden && document.body.matches('.stale')")
        assert "bus" in reader.page.inner_text(".alert")
        live.server.start()
        reader.wait("() => document.querySelector('.alert').hidden && !document.body.matches('.stale')")
        step = live.advance(2)
        reader.wait(f"step => ({STEPS_OF})('train/entropy')?.at(-1) === step", step)
        assert reader.page.evaluate(STEPS_OF, "train/entropy") == list(range(1, step + 1))


def test_a_restarted_server_of_the_page(live: LiveRun, browser: Any) -> None:
    with ExitStack() as stack:
        serving = stack.enter_context(ExitStack())
        port = stack.enter_context(KeptPort()).number
        served = serving.enter_context(dashboard(live, port=port))
        reader = stack.enter_context(reading(browser, served))
        reader.expected = re.compile("ERR_|Failed to fetch|503")
        reader.show("learning")
        reader.wait(f"() => ({STEPS_OF})('train/entropy')?.length > 1")
        serving.close()
        reader.wait("() => document.querySelector('.alert').textContent.includes('does not answer')")
        step = live.advance(1)
        stack.enter_context(dashboard(live, port=port))
        reader.wait("() => document.querySelector('.alert').hidden && !document.body.matches('.stale')")
        reader.wait(f"step => ({STEPS_OF})('train/entropy')?.at(-1) === step", step)
        assert reader.page.evaluate(STEPS_OF, "train/entropy") == list(range(1, step + 1))


def test_hostile_samples_do_nothing(address: str, live: LiveRun, browser: Any) -> None:
    seqs = [live.publish(5_000 + place, 0, response=text, prompt=text) for place, text in enumerate(HOSTILE)]
    large = live.publish(6_000, 0, response="<b>" + "é" * TEN_MB)
    broken = live.publish_broken()
    with reading(browser, address) as reader:
        for seq, text in zip(seqs, HOSTILE, strict=True):
            reader.show(f"sample={seq}")
            shown = reader.page.inner_text(".conversation")
            assert text[:5].replace("\x1b", "\\x1b") in shown
            assert not {"\x1b", "\u202e", "\u2066", "\u2028", "\x00"} & set(shown)
        assert "\\u202e" in reader.page.inner_text(".conversation")
        reader.show(f"sample={large}")
        assert len(reader.page.inner_text(".conversation")) < 200_000
        reader.page.click("text=show next")
        reader.wait("() => document.querySelector('.turn.response pre').textContent.length > 100_000")
        reader.show(f"sample={broken}")
        assert "#" in reader.page.inner_text("main")
        reader.show("samples")
        reader.wait("() => document.querySelectorAll('[aria-label=Samples] tbody tr').length > 5")
        assert "\u202e" not in reader.page.inner_text("main")
        assert reader.page.evaluate("window.pwned") is None
        assert reader.page.evaluate("document.querySelectorAll('main script, main img, main style').length") == 0


def test_keyboard_filter_and_quoted_tokens(address: str, browser: Any) -> None:
    with reading(browser, address) as reader:
        page = reader.page
        reader.show("samples")
        reader.wait("() => document.querySelector('tr[aria-selected]')")
        page.keyboard.press("j")
        reader.wait("() => document.querySelectorAll('[aria-label=Samples] tbody tr')[1].matches('[aria-selected]')")
        seq = page.inner_text("tr[aria-selected] td")
        page.keyboard.press("Enter")
        reader.wait("seq => document.querySelector('.headline h2')?.textContent === seq", seq)
        page.go_back()
        page.wait_for_selector("tr[aria-selected]")
        page.keyboard.press("/")
        page.keyboard.type("reward=0 task=2")
        page.keyboard.press("Enter")
        reader.wait("() => location.hash.includes('filter=reward%3D0%20task%3D2')")
        reader.wait("() => document.querySelectorAll('[aria-label=Samples] tbody tr').length === 1")
        page.reload()
        page.wait_for_selector("tr[aria-selected]")
        assert page.input_value("input[type=search]") == "reward=0 task=2"
        reader.show("samples&filter=step%3D2")
        reader.wait("() => document.querySelectorAll('[aria-label=Samples] tbody tr').length === 4")
        rows = "[...document.querySelectorAll('[aria-label=Samples] tbody tr')]"
        outcomes = f"{rows}.map(row => row.cells[8].textContent)"
        assert page.evaluate(outcomes) == ["trained"] * 4
        reader.show("samples")
        page.fill("input[aria-label^='go to']", "#3")
        page.keyboard.press("Enter")
        reader.wait("() => document.querySelector('[aria-label=Samples] tbody td').textContent === '#3'")
        page.click("text=hardest prompts")
        reader.wait("() => document.querySelector('[aria-label^=Hardest]').getBoundingClientRect().top < innerHeight")
        reader.show("sample=1&t=1-2")
        assert page.evaluate("document.querySelectorAll('.tokens .quoted').length") == 2


def test_an_operator_scales_drains_and_decides_on_dead_tasks(address: str, live: LiveRun, browser: Any) -> None:
    """The buttons are there with the operator's token alone, and stay while events come."""
    live.give_up(8_000)
    live.give_up(8_001)
    with dashboard(live, "--operator") as served, reading(browser, served) as reader:
        page = reader.page
        reader.show("fleet")
        page.fill("input[aria-label='actors of h0']", "5")
        page.click("text=scale")
        poll(lambda: live.desired().get("host.h0") == {"actor": 5})
        reader.wait("() => document.querySelector('.scale button').textContent === 'scale: done'")
        page.click(".scale >> text=drain")
        poll(lambda: live.desired().get("host.h0") == {"actor": 0})
        reader.wait_step(live.advance(1))
        reader.show("flow")
        for task, word in ((8_000, "requeue"), (8_001, "drop")):
            page.click(f"[aria-label='Dead tasks'] tr:has-text('{task}') >> text={word}")
            poll(lambda task=task, word=word: live.decision(task) == word)
    with reading(browser, address) as reader:
        reader.show("fleet")
        assert reader.page.query_selector(".scale") is None
        reader.show("flow")
        assert reader.page.query_selector("[aria-label='Dead tasks'] button") is None


def test_a_check_of_the_accounting_on_request(address: str, browser: Any) -> None:
    with reading(browser, address) as reader:
        reader.show("flow")
        assert "not checked yet" in reader.page.inner_text(".audit")
        reader.page.click("text=check now")
        reader.wait("() => document.querySelector('.audit').matches('.good, .badly')")
        assert "lost 0 · trained twice 0" in reader.page.inner_text(".audit")


def test_a_renderer_of_an_environment(live: LiveRun, browser: Any, tmp_path: Path) -> None:
    """It draws its samples, and the page's policy holds for it, too."""
    (tmp_path / "board.js").write_text(RENDERER)
    seq = live.publish(7_000, 0, metadata={"environment": "board"})
    with dashboard(live, "--renderers", str(tmp_path)) as served, reading(browser, served) as reader:
        reader.expected = re.compile("Content Security Policy")
        reader.show(f"sample={seq}")
        reader.wait("() => document.querySelector('.own .board')?.textContent === 'board of 0, request refused'")
        reader.show("sample=1")
        assert reader.page.query_selector(".own") is None
    words = ("dashboard", "--bus", live.server.url, "--run", RUN, "--renderers", str(tmp_path / "none"))
    refused = run_tidemill(*words)
    assert refused.returncode == 2 and "--renderers: want a directory" in refused.output


END_IN_SIGHT = """(({ scrollTop, clientHeight, scrollHeight }) => scrollHeight > clientHeight + 9
  && scrollTop + clientHeight >= scrollHeight - 4)(document.querySelector('pre.log'))"""


def look_at_late_answer(reader: Reader, live: LiveRun) -> None:
    """While an answer is awaited no second one is asked for. That for a log that is no longer chosen is dropped, and of
    another one the end is in sight.
    """
    reader.show("setup&log=b0")
    reader.wait("() => document.querySelector('pre.log').textContent === 'of b0'")
    held: list[Any] = []
    reader.page.route("**/api/logs?name=b0", lambda route: held.append(route))
    reader.page.click("[aria-label=Logs] button:text-is('b0')")
    poll(lambda: reader.page.evaluate("1") and held)
    num_held = len(held)
    reader.page.evaluate("performance.now = () => 1e9")
    reader.wait_step(live.advance(1))
    reader.page.evaluate("delete performance.now")
    assert len(held) == num_held
    reader.page.click("[aria-label=Logs] button:text-is('a0')")
    reader.wait(f"() => document.querySelector('pre.log').textContent.endsWith('three') && {END_IN_SIGHT}")
    reader.page.evaluate(
        """() => { const log = document.querySelector('pre.log'); window.changes = 0;
      new MutationObserver(() => window.changes++).observe(log, { childList: true }) }"""
    )
    with reader.page.expect_response("**/api/logs?name=b0"):
        for route in held:
            route.continue_()
    with reader.page.expect_response("**/api/logs?name=a0"):
        pass
    assert reader.page.evaluate("window.changes") == 0, "no late answer, and a text that is the same is left alone"
    reader.show("setup&log=a0&q=x")
    reader.wait(f"() => {END_IN_SIGHT}")


def test_settings_and_logs(live: LiveRun, browser: Any) -> None:
    """In full by search, and without the secret of this run; a log that grows is followed, one elsewhere is named.

    With a token: without one a page shows no file of a directory that is private, as those of tests are.
    """
    folder = live.directory / "logs"
    folder.mkdir()
    (live.directory / "config.yaml").write_text(f"run: {RUN}\nbus:\n  auth: false\n")
    (folder / "a0.log").write_text("one\n<b>two</b> \u202e\n")
    rows = "[...document.querySelectorAll('[aria-label=Settings] tbody tr')].map(row => row.cells[0].textContent)"
    log = "document.querySelector('pre.log').textContent"
    (folder / "b0.log").write_text("of b0\n")
    with dashboard(live, "--run-dir", str(live.directory), "--token") as served, reading(browser, served) as reader:
        reader.show("setup")
        assert {"learner.steps", "staleness.max_lag"} <= set(reader.page.evaluate(rows))
        assert SECRET not in reader.page.content() and "(hidden)" in reader.page.inner_text("[aria-label=Settings]")
        reader.page.fill("[aria-label='search settings']", "largest LAG in")
        reader.wait(f"() => !{rows}.includes('learner.steps')")
        assert "staleness.max_lag" in reader.page.evaluate(rows)
        assert "setup&q=largest" in reader.page.evaluate("location.hash")
        assert reader.page.evaluate(log) == "one\n<b>two</b> \\u202e"
        with (folder / "a0.log").open("a") as file:
            file.write("".join(f"line {number}\n" for number in range(300)) + "three\n")
        reader.wait(f"() => {log}.endsWith('three') && {END_IN_SIGHT}")
        look_at_late_answer(reader, live)
        assert "engine e0" in reader.page.inner_text("[aria-label=Logs] table")
        reader.show("setup&log=elsewhere")
        reader.wait(
            "() => document.querySelector('[aria-label=Logs]').textContent.includes('no log of elsewhere is on')"
        )


def test_the_use_of_processes_and_devices(address: str, browser: Any) -> None:
    """As heartbeats have it: this machine has no GPU, so one row says what a driver would."""
    with reading(browser, address) as reader:
        reader.show("fleet")
        cells = "[...document.querySelectorAll('[aria-label=Now] tbody tr')].map(row => [...row.cells].slice(5, 8)"
        lines = f"{cells}.map(cell => cell.textContent).join(' '))"
        reader.wait(f"() => {lines}.some(text => /^\\S+ % \\S+ [MG]iB CPU$/.test(text))")
        reader.wait(f"() => {lines}.some(text => text.includes('GPU-5a · 87 % · 61 GiB of 80 GiB'))")
        facts = "document.querySelector('.facts').innerText"
        reader.wait(f"() => ['CPU in use', '50 %', 'of 2'].every(words => {facts}.includes(words))")


def test_a_filter_that_cannot_be_read_is_explained(address: str, browser: Any) -> None:
    with reading(browser, address) as reader:
        reader.expected = re.compile("400")
        reader.show("samples&filter=reward%3Dhigh")
        assert "want" in reader.page.inner_text("[role=alert].badly")


def test_finished_run_and_exported_file(live: LiveRun, browser: Any, tmp_path: Path) -> None:
    live.finish()
    with dashboard(live) as served, reading(browser, served, width=390) as reader:
        reader.wait("() => document.querySelector('.state').dataset.kind === 'finished'")
        look_at_all(reader, tmp_path, 390)
    file = tmp_path / "run.html"
    ended = run_tidemill("dashboard", "--bus", live.server.url, "--run", RUN, "--export", str(file))
    assert ended.returncode == 0, ended.output
    with reading(browser, file.as_uri()) as reader:
        look_at_all(reader, tmp_path, 1440)
        reader.show("setup&q=steps")
        text = reader.page.inner_text("main")
        assert "learner.steps" in text and SECRET not in file.read_text() and "not in this file" in text
        reader.show("samples&filter=reward%3D1")
        assert reader.page.evaluate("document.querySelectorAll('[aria-label=Samples] tbody tr').length") > 0
