"""A browser of this machine, and pages whose errors and requests to other hosts fail the test."""

import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

PROGRAM = "chromium"
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
WAIT_MS = 60_000
"""Longest wait for the page; it is an event that ends it."""
CONTENT = "main:not([aria-busy]) > *"
LEAVE = "hash => location.hash === hash || document.querySelector('main').setAttribute('aria-busy', 'true')"
"""The page says that it is busy once it sees the new address, which may be after the first look of a test."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start the browser; skip the test with the reason where there is none."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"no program {PROGRAM}: as root, apt-get install chromium (make programs)")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("no package playwright: pip install 'tidemill[test]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="tidemill-browser-") as directory:
        context = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, env={"HOME": directory})
        try:
            yield context
        finally:
            context.close()


class Reader:
    """One reader: a page in a context of its own, with what went wrong in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.base = page, address.split("?")[0]
        self.errors: list[str] = []
        self.expected = re.compile("a^")  # Errors that the test provokes
        self._host = urlsplit(address).netloc
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self._note(f"page error: {error}"))
        page.on("request", self._check_host)

    def _note_message(self, message: Any) -> None:
        if message.type == "error":
            self._note(message.text)

    def _note(self, text: str) -> None:
        if not self.expected.search(text):
            self.errors.append(text)

    def _check_host(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "file") and parts.netloc != self._host:
            self.errors.append(f"request to {request.url}")

    def show(self, name: str) -> None:
        """Show a page of the run, and wait until it is there."""
        self.page.evaluate(LEAVE, f"#{name}")
        self.page.goto(f"{self.base}#{name}")
        self.page.wait_for_selector(CONTENT)

    def wait(self, condition: str, argument: Any = None) -> Any:
        """Wait until a condition in JavaScript holds, and return its value."""
        return self.page.wait_for_function(condition, arg=argument, polling=100).json_value()

    def wait_step(self, step: int) -> None:
        self.wait("step => document.querySelector('.progress').textContent.startsWith(`step ${step} `)", step)


@contextmanager
def reading(browser: Any, address: str, *, width: int = 1440, scheme: str = "light") -> Iterator[Reader]:
    """Open the page; at the end nothing may have gone wrong."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    reader = Reader(context.new_page(), address)
    try:
        reader.page.goto(address)
        reader.page.wait_for_selector(CONTENT)
        yield reader
        assert not reader.errors, "\n".join(reader.errors)
    finally:
        context.close()
