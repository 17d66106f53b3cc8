"""The page at `/`, as a browser shows it, of a relay in each state.

`CDC_OUTBOX_TEST_PICTURES=docs` keeps the pictures; with `CDC_OUTBOX_TEST_HISTORY=60` each has as many steps to plot.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_outbox.embedded import PostgresServer, TansuBroker, postgres_bindir
from cdc_outbox.errors import PreconditionError
from cdc_outbox.http import MetricsServer
from cdc_outbox.metrics import Figures
from tests.fix_command import Command, Running, get
from tests.fix_kafka import Broker
from tests.fix_postgres import Database
from tests.relay_rig import Load, metrics_url
from tests.slot_rig import SlotRig
from tests.waiting import eventually
from tests.watched.browser import Browser

STEPS = int(os.environ.get("CDC_OUTBOX_TEST_HISTORY", "1"))
PHONE, PHONE_HEIGHT = 390, 830
LARGEST_PICTURE = 100_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser.start()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """On an empty page, with an empty console."""
    chromium.look(PHONE)
    chromium.open("about:blank")
    chromium.complaints()
    return chromium


@pytest.fixture(scope="module")
def tansu() -> Iterator[TansuBroker]:
    """For what the page shows any broker does; this one starts in a moment."""
    with TansuBroker() as broker:
        yield broker.start()


@pytest.fixture(scope="module")
def limited(postgres_major: int) -> Iterator[PostgresServer]:
    """A server on which a slot has a budget."""
    with PostgresServer(postgres_bindir(postgres_major), settings={"max_slot_wal_keep_size": "1GB"}) as server:
        yield server.start()


@pytest.fixture
def rig(
    limited: PostgresServer, tansu: TansuBroker, new_database: Callable[[PostgresServer], Database], command: Command
) -> SlotRig:
    broker = Broker("tansu", tansu.bootstrap, tansu)
    rig = SlotRig(new_database(limited), broker, command, broker.create_topic())
    rig.slot = rig.publication = "cdc_outbox"  # the server is ours: a name as in real life
    rig.init()
    return rig


def wait_for_word(browser: Browser, word: str, deadline: float = 30) -> None:
    eventually(lambda: browser.text("#word") == word, deadline, f"the page says {word}")


def wait_for_plots(browser: Browser) -> None:
    """One step takes five seconds."""
    points = (
        "const d = document.querySelector('path.first').getAttribute('d'); return d ? d.split(/[ML]/).length - 1 : 0"
    )
    eventually(lambda: browser.run(points) >= STEPS, 30 + 6 * STEPS, "there is something to plot")


def check_layout(browser: Browser) -> None:
    """Nothing is cut off on a small phone or a wide screen, in either colour scheme, and no policy was violated."""
    for width in (320, PHONE, 1280):
        for dark in (False, True):
            browser.look(width, dark=dark)
            assert browser.run("return document.documentElement.scrollWidth") == width
            colours = browser.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
            lightness = [sum(map(int, colour.strip("rgb()").split(","))) for colour in colours]
            assert (lightness[0] > lightness[1]) is dark
    assert browser.complaints() == []


def keep_picture(browser: Browser, name: str, tmp_path: Path, *, dark: bool = False) -> None:
    browser.look(PHONE, dark=dark)
    path = Path(os.environ.get("CDC_OUTBOX_TEST_PICTURES", tmp_path)) / f"page-{name}.png"
    path.write_bytes(browser.picture(PHONE_HEIGHT))
    assert 5_000 < path.stat().st_size < LARGEST_PICTURE


def open_page(browser: Browser, relay: Running) -> None:
    browser.open(f"{metrics_url(relay)}/")


def test_a_relay_at_work_shows_rate_latency_and_budget_and_one_that_is_gone_is_missed(
    browser: Browser, rig: SlotRig, tmp_path: Path
) -> None:
    relay = rig.stream("--purge-every", "1s")
    open_page(browser, relay)
    with Load(rig, seed=1):
        wait_for_word(browser, "Streaming")
        wait_for_plots(browser)
        eventually(lambda: "rows; " in browser.text("#purge"), 20, "a purge was told of")
        eventually(lambda: "more until the slot is lost" in browser.text("#budget"), 10, "the budget is told")
        assert browser.text("#slot_name") == rig.slot
        assert "in use" in browser.text("#slot")
        rate, latency, _ = browser.run("return [...document.querySelectorAll('output')].map((o) => o.innerText)")
        assert rate.endswith("rows/s")
        assert latency.startswith("p50 ")
        assert browser.text("#message") == "none since it started"
        check_layout(browser)
        keep_picture(browser, "streaming", tmp_path)
    _, status = get(f"{metrics_url(relay)}/status.json")
    assert not any(task in status for task in Load.TASKS), "names of the figures only, nothing of a row"
    assert relay.terminate() == 0
    wait_for_word(browser, "No answer")
    assert browser.text("#why").startswith("no word from the relay for ")


def test_a_paused_broker_shows_as_stalled_with_what_waits_and_what_to_do(
    browser: Browser, rig: SlotRig, tansu: TansuBroker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    relay = rig.stream("--stalled-after", "1s")
    open_page(browser, relay)
    with Load(rig, seed=2):
        wait_for_plots(browser)
    eventually(lambda: browser.text("#why") == "nothing waits", 30, "all is acknowledged")
    request.addfinalizer(tansu.resume)
    tansu.pause()
    rig.stage(count=2)
    wait_for_word(browser, "Stalled")
    assert browser.text("#why").startswith("nothing acknowledged or confirmed for ")
    assert "Kafka has not acknowledged 2 rows" in browser.text("#todo")
    assert browser.text("#flight strong") == "2"
    assert browser.text("#lag strong").endswith(" s")
    plotted = "return [...document.querySelectorAll('output')].map((o) => o.innerText)"
    eventually(lambda: browser.run(plotted)[0] == "0 rows/s", 20, "the rate has fallen")
    assert browser.run(plotted)[2] not in ("", "0 s"), "and the lag has not"
    check_layout(browser)
    keep_picture(browser, "stalled", tmp_path)
    tansu.resume()
    wait_for_word(browser, "Streaming", 60)
    assert browser.text("#todo") == ""


def test_a_relay_in_standby_says_who_holds_the_slot_and_takes_over(
    browser: Browser, rig: SlotRig, tmp_path: Path
) -> None:
    first = rig.stream()
    second = rig.start()
    second.wait_for_log("standby: ")
    open_page(browser, second)
    wait_for_word(browser, "Standby")
    assert browser.text("#why").startswith(f"slot {rig.slot} is held by ")
    assert browser.text("#lag strong") == "none"
    check_layout(browser)
    keep_picture(browser, "standby", tmp_path, dark=True)
    assert first.terminate() == 0
    wait_for_word(browser, "Streaming")


def test_the_last_error_is_shown_as_text_with_its_remedy(browser: Browser) -> None:
    figures = Figures("slot")
    figures.note(PreconditionError("no <i>such</i> thing", "make one & go on"))
    figures.enter("failed", "no <i>such</i> thing")
    figures.dead_letters = 3
    server = MetricsServer("127.0.0.1:0", figures)
    try:
        browser.open(f"http://127.0.0.1:{server.port}/")
        wait_for_word(browser, "Starting over")
        assert browser.text("#message").endswith("ago: no <i>such</i> thing")
        assert browser.text("#hint") == "make one & go on"
        assert browser.text("#todo") == "make one & go on"
        assert browser.text("#letters strong") == "3"
        assert browser.text("#budget") == "Postgres has not told of it yet"
        check_layout(browser)
    finally:
        server.close()
