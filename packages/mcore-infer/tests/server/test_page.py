"""The page of the server in a real browser: headless Chromium, driven by playwright."""

import shutil

import pytest

from mcore_infer import SamplingConfig, generate_text

playwright = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium, or the one that playwright has installed."""
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_the_page_writes_chats_stops_and_says_what_is_wrong(browser, client, long_model):
    page = browser.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"http://127.0.0.1:{client.port}/")

    def write(prompt, tokens=8, temperature="0"):
        page.fill("#prompt", prompt)
        page.fill("#tokens", str(tokens))
        page.fill("#temperature", temperature)
        page.click("#go")

    def wait():
        page.wait_for_function("!document.getElementById('go').disabled")
        return page.text_content("#text"), page.text_content("#error")

    sampling = SamplingConfig(num_tokens=8, top_k=1)
    (expected,) = generate_text(long_model.model, long_model.tokenizer, ["In the"], sampling)
    write("In the")
    assert wait() == ("In the" + expected, "")
    page.check("#chat")
    write("In the")
    rendered = "u:In the\na:"
    (expected,) = generate_text(long_model.model, long_model.tokenizer, [rendered], sampling)
    assert wait() == (expected, "")
    page.uncheck("#chat")
    write("a" * 600)
    assert "maximum context length was exceeded" in wait()[1]
    write("In the", 400, "1")
    page.wait_for_function("document.getElementById('text').textContent.length > 12")
    page.click("#stop")
    text, error = wait()
    assert text.startswith("In the")
    assert error == ""
    client.wait_until_idle()
    assert not faults
