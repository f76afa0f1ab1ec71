"""A headless Chromium, driven over its debugging pipe: Python's own library alone. Twin: test_page.py.

Not a general driver: one page, no navigation history, no network.
"""
import base64
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 120  # seconds for one answer, or one condition


def find():
    return next(filter(None, map(shutil.which, NAMES)), None)


def pipe():
    """A pipe whose descriptors are not among those that a shell moves."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high


class Browser:
    def __init__(self, program):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.write = pipe()
        self.read, from_browser = pipe()
        # Descriptors 3 and 4 are what the browser listens to and answers on.
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage --no-first-run"
        command = (f'exec {program} {options} --user-data-dir={self.folder.name} --remote-debugging-pipe about:blank '
                   f'3<&{to_browser} 4>&{from_browser} >/dev/null 2>&1')
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(to_browser, from_browser))
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.held, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.held:
            some = os.read(self.read, 1 << 16)
            if not some:
                raise RuntimeError("the browser is gone")
            self.held += some
        one, self.held = self.held.split(b"\0", 1)
        return json.loads(one)

    def call(self, method, **arguments):
        self.number += 1
        question = {"id": self.number, "method": method, "params": arguments}
        if self.session:
            question["sessionId"] = self.session
        os.write(self.write, json.dumps(question).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails'].get('exception', answer)}")
        return answer["result"].get("value")

    def until(self, expression):
        end = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise RuntimeError(f"never true: {expression}")
            time.sleep(.05)

    def open(self, path):
        self.call("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def size(self, width, height, scale=1, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=mobile)

    def media(self, **features):
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": name.replace("_", "-"), "value": value} for name, value in features.items()])

    def key(self, key, times=1, modifiers=0):
        """modifiers: 1 is Alt, 2 Ctrl, 4 Meta."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers)

    def picture(self, path, whole=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def problems(self):
        """Errors of scripts, and everything that was asked of a network or disk beside the page."""
        found = []
        for event in self.events:
            detail = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(detail["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            if event.get("method") == "Network.requestWillBeSent":
                url = detail["request"]["url"]
                if not url.startswith(("file:", "blob:", "about:", "data:")) or url.endswith((".js", ".css", ".wasm")):
                    found.append(f"asked for {url}")
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)
        self.folder.cleanup()
