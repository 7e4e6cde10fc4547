"""A browser, for what only a browser shows."""

import os
import shutil

import pytest

STRICT = os.environ.get("MMM_CLUSTER_TESTS") == "required"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    """The path of a browser. Where none is there, a skip that can be seen, or a failure where it is required."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        (pytest.fail if STRICT else pytest.skip)(f"missing for this test: {' or '.join(BROWSERS)}")
    return path
