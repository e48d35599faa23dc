// A server to be visited in a sandbox: node server.js PORT [START_AFTER_MS]
//
//   /            "hello"
//   /started     when this process began to listen; another after a cold wake
//   /held        answers when somebody asks for /free
//   /ticks       server-sent events, ten a second, without end
//   /events      server-sent events: one at once, another whenever somebody asks for /event
//   /zeros?n=    n bytes, at most 64 KiB at a time
//   /never       never answers
//   /reset       accepts and resets the connection
//   /open        requests of /never, /held and /ticks that are still open
//   /sink        reads a body and answers with its length
//   /ws          a WebSocket that sends back what it gets
const http = require("http");
const crypto = require("crypto");

const started = String(process.hrtime.bigint()) + "-" + Math.random();
const held = [];
const listeners = new Set();
let open = 0;

function keep(res) {
  open++;
  res.on("close", () => open--);
}

function zeros(res, left) {
  res.setHeader("Content-Length", left);
  const chunk = Buffer.alloc(65536);
  const more = () => {
    while (left > 0) {
      const n = Math.min(left, chunk.length);
      left -= n;
      if (!res.write(chunk.subarray(0, n))) {
        res.once("drain", more);
        return;
      }
    }
    res.end();
  };
  more();
}

const server = http.createServer((req, res) => {
  const url = new URL(req.url, "http://localhost");
  switch (url.pathname) {
    case "/":
      return res.end("hello");
    case "/started":
      return res.end(started);
    case "/held":
      held.push(res);
      return keep(res);
    case "/free":
      held.splice(0).forEach((waiting) => waiting.end("waited"));
      return res.end();
    case "/ticks": {
      keep(res);
      res.setHeader("Content-Type", "text/event-stream");
      const timer = setInterval(() => res.write("data: tick\n\n"), 100);
      res.on("close", () => clearInterval(timer));
      return;
    }
    case "/events":
      res.setHeader("Content-Type", "text/event-stream");
      listeners.add(res);
      res.on("close", () => listeners.delete(res));
      return res.write("data: event\n\n");
    case "/event":
      listeners.forEach((listener) => listener.write("data: event\n\n"));
      return res.end();
    case "/zeros":
      return zeros(res, Number(url.searchParams.get("n")));
    case "/never":
      return keep(res);
    case "/reset":
      return req.socket.resetAndDestroy();
    case "/open":
      return res.end(String(open));
    case "/sink": {
      let n = 0;
      req.on("data", (b) => (n += b.length));
      req.on("end", () => res.end(String(n)));
      return;
    }
  }
  res.statusCode = 404;
  res.end();
});

// RFC 6455, as much as an echo of short frames needs.
server.on("upgrade", (req, socket) => {
  const accept = crypto
    .createHash("sha1")
    .update(req.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")
    .digest("base64");
  socket.write(
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
      "Sec-WebSocket-Accept: " + accept + "\r\n\r\n",
  );
  let buffer = Buffer.alloc(0);
  socket.on("error", () => socket.destroy());
  socket.on("data", (data) => {
    buffer = Buffer.concat([buffer, data]);
    while (buffer.length >= 6) {
      const length = buffer[1] & 0x7f;
      if (buffer.length < 6 + length) return;
      const payload = Buffer.from(buffer.subarray(6, 6 + length));
      for (let i = 0; i < length; i++) payload[i] ^= buffer[2 + (i % 4)];
      socket.write(Buffer.concat([Buffer.from([buffer[0], length]), payload]));
      if ((buffer[0] & 0x0f) === 8) return socket.end();
      buffer = buffer.subarray(6 + length);
    }
  });
});

setTimeout(() => server.listen(Number(process.argv[2]), "127.0.0.1", 4096), Number(process.argv[3] || 0));
