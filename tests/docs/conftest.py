"""A browser, for what only a browser shows."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from support.pages import SITE

STRICT = os.environ.get("MMM_CLUSTER_TESTS") == "required"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAVE = """
const left = document.body.appendChild(document.createElement("pre"));
left.id = "left";
const leave = (value) => { left.textContent = JSON.stringify(value); };
"""


@pytest.fixture
def opened(tmp_path):
    """What a script has left by `leave(value)`, run in a page of the site, opened from a file, after the page's own.
    Where no browser is there, a skip that can be seen, or a failure where it is required."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        (pytest.fail if STRICT else pytest.skip)(f"missing for this test: {' or '.join(BROWSERS)}")

    def run(name, script, width=1200, address=""):
        shutil.copytree(SITE, tmp_path / "site", dirs_exist_ok=True)
        page = tmp_path / "site" / name
        text = page.read_text(encoding="utf-8")
        assert text.count("</body>") == 1
        script = f"<script>addEventListener('load', () => {{{LEAVE}{script}}});</script></body>"
        page.write_text(text.replace("</body>", script), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        command += [
            f"--window-size={width},2000",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"file://{page}{address}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        left = re.search(r'<pre id="left">(.*?)</pre>', done.stdout, re.DOTALL)
        assert left, done.stderr[-2000:] + done.stdout[-2000:]
        return json.loads(html.unescape(left[1]) or "null")

    return run
