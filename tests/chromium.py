"""Start a headless Chromium for the tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """Yield a browser: the Chromium that is here, or playwright's own; skip the test without one.

    Args:
        options: more words of its command line.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-full` installs it")
    here = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=here, args=["--no-sandbox", *options])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium is here: {str(error).splitlines()[0]}")
        yield made
        made.close()
