"""The page at `/` in Chromium, where it and Selenium are installed (Debian: chromium-driver)."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builder.serve.conftest import Server

webdriver = pytest.importorskip("selenium.webdriver")
wait = pytest.importorskip("selenium.webdriver.support.wait")

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# pip does not install a browser.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):  # root, and a small /dev/shm
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


class Page:
    def __init__(self, browser: Any, server: Server) -> None:
        self.browser = browser
        browser.get(f"http://127.0.0.1:{server.port}/")

    def by(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def texts(self, kind: str) -> list[str]:
        return [found.text for found in self.browser.find_elements("css selector", f".message.{kind}")]

    def until(self, condition: Any) -> None:
        wait.WebDriverWait(self.browser, 60).until(lambda _: condition())

    def send(self, text: str) -> None:
        rates = len(self.browser.find_elements("css selector", "main .rate"))
        self.by("#text").send_keys(text + "\n")
        self.until(lambda: len(self.browser.find_elements("css selector", "main .rate")) > rates)

    def idle(self) -> bool:
        return bool(self.by("#send").is_enabled())


@pytest.fixture
def page(browser: Any, server: Server) -> Page:
    page = Page(browser, server)
    page.until(lambda: page.texts("error"))  # no key yet
    page.by("#key").send_keys("second")
    return page


def test_a_chat(page: Page, server: Server) -> None:
    """Two turns, streamed: their texts are those that OpenAI's client gets."""
    assert "API key" in page.texts("error")[0]
    page.by("#tokens").clear()
    page.by("#tokens").send_keys("12")
    messages: list[Any] = []
    for turn in ("<b>Return</b> a list", "and then"):
        page.send(turn)
        page.until(page.idle)
        messages.append({"role": "user", "content": turn})
        given: Any = {"model": "llama", "messages": messages, "max_tokens": 12, "temperature": 0}
        expected = server.client().chat.completions.create(**given).choices[0].message.content
        shown = page.browser.execute_script(
            "return [...document.querySelectorAll('.message.assistant')].at(-1).textContent"
        )
        assert shown == expected
        messages.append({"role": "assistant", "content": expected})
    assert page.texts("user")[0] == "<b>Return</b> a list"  # text, not HTML
    assert page.by("#model").text == "llama"
    assert "tokens: first after" in page.by("main .rate").text
    assert [line for line in page.browser.get_log("browser") if "401" not in line["message"]] == []


def test_stop(page: Page, server: Server) -> None:
    page.by("#tokens").clear()
    page.by("#tokens").send_keys("250")
    page.send("def")
    page.by("#stop").click()
    page.until(page.idle)
    page.until(lambda: "running_requests 0.0" in server.get("/metrics"))
    assert len(page.texts("error")) == 1


def test_what_the_server_refuses(page: Page) -> None:
    page.by("#temperature").send_keys("99")
    page.send("def")
    page.until(lambda: len(page.texts("error")) == 2)
    assert "temperature" in page.texts("error")[1]


def test_a_picture_goes_along(browser: Any, server: Server, tmp_path: Path) -> None:
    """As a data URL in the request, where the model takes images; this one is made to say so."""
    page = Page(browser, server)
    page.by("#key").send_keys("second")
    page.browser.execute_script(
        "model = 'llama'; isChat = true; by('with-image').hidden = false;"
        "window.sent = [];"
        "window.fetch = (path, options) => { sent.push(JSON.parse(options.body)); throw new Error('caught'); };"
    )
    png = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    (tmp_path / "a.png").write_bytes(png)
    page.by("#image").send_keys(str(tmp_path / "a.png"))
    page.send("what is this")
    [sent] = page.browser.execute_script("return window.sent")
    image, text = sent["messages"][0]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(png).decode()
    assert text == {"type": "text", "text": "what is this"}
    assert page.by(".message.user img").is_displayed()
