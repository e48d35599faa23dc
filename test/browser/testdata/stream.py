"""A page that counts the events of a stream, which comes in small pieces for ever."""

import itertools
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = b"""<!doctype html>
<title>A stream</title>
<link rel="icon" href="data:,">
<script>
window.opened = 0; window.count = 0;
const source = new EventSource("/events");
source.onopen = () => { window.opened++; };
source.onmessage = (event) => { window.count = Number(event.data); };
</script>
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/events":
            self.answer("text/html; charset=utf-8")
            self.wfile.write(PAGE)
            return
        self.answer("text/event-stream")
        try:
            for n in itertools.count(1):
                self.wfile.write(b"data: %d\n\n" % n)
                time.sleep(0.05)
        except OSError:
            pass  # the visitor has left

    def answer(self, content_type):
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()


ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
