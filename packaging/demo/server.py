"""A page that knows how long it slept, for the sandbox that `make up` makes.

A thread notes the time ten times a second. Where two notes are further apart,
the sandbox was frozen in between: no process of it ran.
"""

import threading
import time
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8000
TICK = 0.1  # seconds
ASLEEP = 1.0  # a longer gap between two notes was sleep, not a busy machine

started = time.monotonic()
lock = threading.Lock()
last = started
naps = []  # length of each, in seconds


def note():
    """Notes the time, and the nap since the last note if there was one."""
    global last
    with lock:
        now = time.monotonic()
        if now - last > ASLEEP:
            naps.append(now - last)
            del naps[:-1000]
        last = now


def tick():
    while True:
        note()
        time.sleep(TICK)


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>doze</title>
<style>
  body {{ font: 18px/1.6 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1rem; color: #222; }}
  code {{ background: #eee; padding: .1em .3em; border-radius: 4px; }}
  @media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }} code {{ background: #333; }} }}
</style>
<h1>{headline}</h1>
<p>{story}</p>
<p>Put me to sleep with <code>doze sleep demo</code>, or leave me alone for a minute.
Then load this page again.</p>
</html>
"""


def page():
    with lock:
        count, total, latest = len(naps), sum(naps), naps[-1] if naps else 0
    if not count:
        headline, story = "Awake.", "I have not slept yet."
    else:
        headline = f"You woke me after {latest:.1f} seconds."
        story = (
            f"I slept {count} time{'s' if count > 1 else ''}, {total:.0f} seconds in all, "
            f"of the {time.monotonic() - started:.0f} since I was started. "
            "While I sleep I keep my memory and use no CPU."
        )
    return PAGE.format(headline=escape(headline), story=escape(story)).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        note()
        body = page()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    threading.Thread(target=tick, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
