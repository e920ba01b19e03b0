"""The server's page in a browser: a message by keyboard, drafted tokens in colour, plain decoding beside it."""

import os
import shutil
import threading

import pytest

from foredraft.api import load
from foredraft.server.running import Listening
from foredraft.server.service import Service
from support.toys import TOY_DRAFT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PICTURE = "FOREDRAFT_PAGE_PICTURE"
"""Names a file for a picture of the page, for the documentation."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture
def browser(tmp_path):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}", "--window-size=360,900"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address():
    generator = load(TOY_DRAFT, method="auto", speculative_config={"table": "none"}, compile=False, dtype="float32")
    listening = Listening(Service(generator, "toy", {"table": "none"}), port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    yield listening.address
    listening.stop()
    thread.join()


def test_a_message_is_answered_and_compared(browser, address):
    converse(browser, address, "Write a function that adds the numbers of a list.", tokens=120)
    assert "the texts are the same" in browser.find_element("css selector", ".verdict").text
    assert browser.find_elements("css selector", ".text .drafted")
    assert "auto" in browser.find_element("css selector", ".legend").text
    assert "tokens a pass" in browser.find_element("css selector", ".facts").text
    width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1]  # nothing is cut off on a narrow screen
    errors = [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]
    assert errors == []


def converse(browser, address, message, tokens):
    """Send a message by keyboard alone, and wait for the last line; a picture is kept where one is asked for."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(address)
    WebDriverWait(browser, 20).until(lambda page: page.find_elements("css selector", "#method option"))
    browser.execute_script(f"document.getElementById('tokens').value = {tokens}")
    browser.switch_to.active_element.send_keys(message, Keys.ENTER)
    WebDriverWait(browser, 60).until(lambda page: page.find_elements("css selector", ".verdict, .error"))
    if PICTURE in os.environ:
        browser.set_window_size(900, 1100)
        browser.save_screenshot(os.environ[PICTURE])


def test_a_new_chat_ends_the_answer_that_is_being_written(browser, address):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(address)
    WebDriverWait(browser, 20).until(lambda page: page.find_elements("css selector", "#method option"))
    browser.execute_script("document.getElementById('tokens').value = 1000")
    browser.switch_to.active_element.send_keys("Count to a thousand.", Keys.ENTER)
    WebDriverWait(browser, 20).until(lambda page: page.find_elements("css selector", ".turn .text"))
    browser.find_element(By.ID, "new").click()
    WebDriverWait(browser, 20).until(lambda page: page.find_element(By.ID, "send").is_enabled())
    assert not browser.find_elements("css selector", ".turn")
    browser.execute_script("document.getElementById('tokens').value = 5")
    browser.switch_to.active_element.send_keys("Hello", Keys.ENTER)
    WebDriverWait(browser, 20).until(lambda page: page.find_elements("css selector", ".facts"))
    assert browser.find_element("css selector", ".turn.user .text").text == "Hello"
