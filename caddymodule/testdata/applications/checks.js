// Servers with checks that others document:
// - Rails: config.hosts of development (Host and the last X-Forwarded-Host are
//   localhost, below .localhost or .test, or an address) if HOSTS is set, and
//   protect_from_forgery, which compares Origin with the request's base_url.
// - code-server: the host of a WebSocket's Origin is the Forwarded host,
//   X-Forwarded-Host or Host.
const http = require("http");
const { createHash } = require("crypto");

const first = (req, name) => (req.headers[name] || "").split(",")[0].trim();
const last = (req, name) => (req.headers[name] || "").split(",").pop().trim();
const local = (host) => /^(localhost|.+\.localhost|.+\.test|127\.0\.0\.1|\[::1\])(:\d+)?$/.test(host);

const server = http.createServer((req, res) => {
  const forwarded = last(req, "x-forwarded-host");
  if (process.env.HOSTS && !(local(req.headers.host) && (!forwarded || local(forwarded)))) {
    res.writeHead(403).end("Blocked hosts: " + req.headers.host);
    return;
  }
  const https = req.headers["x-forwarded-ssl"] === "on" || first(req, "x-forwarded-proto") === "https";
  const base = (https ? "https" : "http") + "://" + (forwarded || req.headers.host);
  if (req.method === "POST" && req.headers.origin && req.headers.origin !== base) {
    res.writeHead(422).end(`HTTP Origin header (${req.headers.origin}) didn't match request.base_url (${base})`);
    return;
  }
  res.end("ok");
});
server.on("upgrade", (req, socket) => {
  const forwarded = /host=([^;,]+)/.exec(req.headers.forwarded || "");
  const host = (forwarded && forwarded[1]) || first(req, "x-forwarded-host") || req.headers.host;
  if (req.headers.origin && new URL(req.headers.origin).host !== host) {
    socket.end("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
    return;
  }
  const accept = createHash("sha1").update(req.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest("base64");
  socket.write("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + "\r\n\r\n");
});
server.listen(process.env.PORT, "127.0.0.1");
