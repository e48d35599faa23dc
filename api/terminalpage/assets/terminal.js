// The page of a terminal. It logs in with the API token, shows what the terminal prints,
// sends what is typed, and after a lost connection continues where the output stopped.
import { Terminal } from "./xterm/xterm.mjs";
import { FitAddon } from "./xterm/addon-fit.mjs";
import { Unicode11Addon } from "./xterm/addon-unicode11.mjs";

const name = decodeURIComponent(location.pathname.split("/")[2]);
const id = new URLSearchParams(location.search).get("id") || "main";

const loginDuration = "12h";
const maxCols = 1000, maxRows = 1000; // the API's limits
const maxMessage = 32 * 1024; // bytes of input in one message
const maxQueued = 1024 * 1024; // bytes of input that wait for a connection
// When the terminal is this many bytes behind, the rest is skipped: Ctrl-C stays quick.
const maxBehind = 4 * 1024 * 1024;
const maxPause = 30_000; // ms between attempts to connect

const element = (id) => document.getElementById(id);
const status = element("status"), action = element("action"), screen = element("terminal"), form = element("login");

// Settings and the login are lost with the page where storage is not permitted.
function stored(storage, key) {
  let value = null;
  return {
    get() {
      try {
        return window[storage].getItem(key);
      } catch {
        return value;
      }
    },
    set(text) {
      value = text;
      try {
        if (text === null) window[storage].removeItem(key);
        else window[storage].setItem(key, text);
      } catch {
        // value has it.
      }
    },
  };
}

// The URL of the WebSocket, which the node has signed for this sandbox. It is in the
// storage of this tab alone, which pages of other origins and ports cannot read.
const login = stored("sessionStorage", `doze-terminal/${name}`);
const readerMode = stored("localStorage", "doze-terminal-reader");

// ---- The terminal

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () =>
  dark.matches
    ? { background: "#111113", foreground: "#edeef0", cursor: "#edeef0", cursorAccent: "#111113", selectionBackground: "#3a4a7d" }
    : {
        background: "#ffffff", foreground: "#1c2024", cursor: "#1c2024", cursorAccent: "#ffffff", selectionBackground: "#c6d4f9",
        black: "#1c2024", red: "#b3261e", green: "#1d7a3e", yellow: "#8a5a00", blue: "#2f4fc4", magenta: "#8e3bb0", cyan: "#0b7285", white: "#60646c",
        brightBlack: "#60646c", brightRed: "#d13438", brightGreen: "#2b8a3e", brightYellow: "#a36a00", brightBlue: "#3e63dd", brightMagenta: "#a144af", brightCyan: "#0c8599", brightWhite: "#80838d",
      };

const terminal = new Terminal({
  allowProposedApi: true, // for the width of characters
  cursorBlink: !matchMedia("(prefers-reduced-motion: reduce)").matches,
  fontFamily: 'ui-monospace, "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
  fontSize: 14,
  minimumContrastRatio: 4.5,
  screenReaderMode: readerMode.get() === "on",
  scrollback: 5000,
  theme: theme(),
});
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.loadAddon(new Unicode11Addon());
terminal.unicode.activeVersion = "11"; // as programs count it: emoji are two columns wide

dark.addEventListener("change", () => { terminal.options.theme = theme(); });
new ResizeObserver(resize).observe(screen);

function resize() {
  const size = fit.proposeDimensions();
  if (!screen.hidden && size?.cols > 0 && size.rows > 0) terminal.resize(Math.min(size.cols, maxCols), Math.min(size.rows, maxRows));
}

// A reconnect does not take the focus from a person who is elsewhere on the page.
function showTerminal() {
  const focus = screen.hidden || document.activeElement === action;
  form.hidden = true;
  screen.hidden = false;
  if (!terminal.element) terminal.open(screen); // once the element has a size
  resize();
  if (focus) terminal.focus();
}

// Tab belongs to the program, so that another key has to leave the terminal.
terminal.attachCustomKeyEventHandler((event) => {
  if (event.key !== "F6" || !event.shiftKey) return true;
  if (event.type === "keydown") element("reader").focus();
  return false;
});
terminal.onTitleChange((title) => { document.title = title ? `${name}: ${title.slice(0, 100)}` : `${name}: terminal`; });

const encoder = new TextEncoder();
terminal.onData((data) => {
  // The terminal responds to queries of programs. Queries in old output have had their response.
  if (!(replaying && data.length > 1 && data.startsWith("\x1b"))) send(encoder.encode(data));
});
terminal.onBinary((data) => send(Uint8Array.from(data, (c) => c.charCodeAt(0))));
terminal.onResize(({ cols, rows }) => { if (ready) socket.send(JSON.stringify({ type: "resize", cols, rows })); });

// ---- The connection

let socket = null;
let ready = false; // the node has sent all output from before the connection
let replaying = false; // the terminal parses output from before the connection
let cursor = null; // position of the output that follows; null if unknown
let behind = 0; // bytes that the terminal has not parsed yet
let skipping = false; // disconnected until it has
let wanted = true; // a person wants the connection: it may wake the sandbox
let attempts = 0, timer = 0;
let queue = [], queued = 0; // input that waits for the connection
let state = "login"; // or connecting, connected, lost, asleep, ended, failed

function show(newState, text, button = "") {
  state = newState;
  status.textContent = text;
  document.body.dataset.state = newState;
  action.textContent = button;
  action.hidden = !button;
}

function connect() {
  disconnect();
  const signed = login.get();
  if (!signed) return askForToken("");
  showTerminal();
  show("connecting", "Connecting…");
  timer = setTimeout(() => { if (state === "connecting") status.textContent = "Connecting. The sandbox may be waking up…"; }, 1500);

  const { pathname, search } = new URL(signed, location.href);
  const url = new URL(pathname + search, location.origin);
  const fresh = cursor === null;
  url.searchParams.set("id", id);
  url.searchParams.set("cols", terminal.cols);
  url.searchParams.set("rows", terminal.rows);
  if (!fresh) url.searchParams.set("since", cursor);
  if (!wanted) url.searchParams.set("wake", "false");
  const route = url.href;
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";

  let opened = false;
  const current = new WebSocket(url);
  socket = current;
  current.binaryType = "arraybuffer";
  const on = (type, listener) => current.addEventListener(type, (event) => { if (current === socket) listener(event); });
  on("open", () => {
    opened = true;
    replaying = fresh;
    if (fresh) terminal.reset();
  });
  on("message", ({ data }) => {
    if (typeof data === "string") receive(JSON.parse(data));
    else print(new Uint8Array(data));
  });
  on("close", () => {
    disconnect();
    if (opened) retry("The connection was lost.");
    else diagnose(route);
  });
}

function disconnect() {
  clearTimeout(timer);
  const old = socket;
  socket = null; // its listeners do nothing from here on
  ready = false;
  old?.close();
}

function print(bytes) {
  if (cursor !== null) cursor += bytes.length;
  behind += bytes.length;
  terminal.write(bytes, () => {
    behind -= bytes.length;
    if (behind > 0 || !skipping) return;
    skipping = false;
    wanted = true; // it ran a moment ago
    connect();
  });
  if (behind > maxBehind && ready) {
    disconnect();
    skipping = true;
    show("lost", "The output is faster than this page. Skipping…");
  }
}

function receive(message) {
  switch (message.type) {
    case "truncated":
      if (!ready) {
        replaying = true;
        terminal.reset();
      }
      cursor = message.cursor;
      break;
    case "ready": {
      const current = socket;
      cursor = message.cursor;
      // After all that came before it.
      terminal.write("", () => { if (current === socket) begin(); });
      break;
    }
    case "exit": {
      const how = message.signal ? `was ended by ${message.signal}` : `ended with exit code ${message.code}`;
      end("ended", `The program ${how}. Press Enter for a new terminal.`);
      break;
    }
    case "error":
      disconnect();
      refused(message.problem ?? { detail: message.message });
      break;
  }
}

// The terminal shows all output from before the connection.
function begin() {
  clearTimeout(timer);
  ready = true;
  replaying = false;
  wanted = false;
  attempts = 0;
  show("connected", "Connected");
  socket.send(JSON.stringify({ type: "resize", cols: terminal.cols, rows: terminal.rows }));
  const unsent = queue;
  queue = [];
  queued = 0;
  unsent.forEach(send);
}

function send(bytes) {
  if (state === "ended" || state === "failed") {
    if (bytes.includes(13)) openNew();
    return;
  }
  if (ready) {
    for (let i = 0; i < bytes.length; i += maxMessage) socket.send(bytes.subarray(i, i + maxMessage));
    return;
  }
  if (queued + bytes.length > maxQueued) return;
  queue.push(bytes);
  queued += bytes.length;
  wanted = true;
  if ((state === "lost" || state === "asleep") && !skipping) connect();
}

// The terminal is over: what was typed for it must not reach another one.
function end(newState, text, button = "New terminal") {
  disconnect();
  queue = [];
  queued = 0;
  cursor = null;
  show(newState, text, button);
}

function openNew() {
  cursor = null;
  wanted = true;
  attempts = 0;
  connect();
}

function retry(why) {
  const pause = Math.min(maxPause, 500 * 2 ** attempts++) * (0.75 + Math.random() / 4);
  if (document.hidden) return show("lost", `${why} It is restored when you return to this page.`, "Connect");
  show("lost", `${why} Trying again…`, "Connect");
  timer = setTimeout(connect, pause);
}

function hurry() {
  if (state === "lost" && !skipping && !document.hidden) connect();
}
addEventListener("online", hurry);
document.addEventListener("visibilitychange", hurry);
addEventListener("offline", () => {
  if (state !== "connected" && state !== "connecting") return;
  disconnect();
  show("lost", "This device is offline.", "Connect");
});

action.addEventListener("click", () => {
  if (state === "ended" || state === "failed") return openNew();
  wanted = true;
  connect();
});

// A browser does not tell why it could not open a WebSocket.
async function diagnose(route) {
  let problem;
  try {
    const response = await fetch(route, { cache: "no-store", credentials: "omit" });
    problem = await response.json();
  } catch {
    problem = null;
  }
  if (socket || state === "login") return; // something happened meanwhile
  if (!problem?.code) return retry("The node does not respond.");
  if (problem.code === "upgrade_required") return retry("The connection failed.");
  refused(problem);
}

function refused(problem) {
  const detail = problem.detail ?? "The node refused the connection.";
  switch (problem.code) {
    case "unauthorized":
    case "signature_expired":
    case "signature_invalid":
      login.set(null);
      return askForToken("Your login has ended. Log in again to continue.");
    case "sandbox_asleep":
    case "sandbox_stopped":
      return show("asleep", "The sandbox is asleep. Type to wake it.", "Wake");
    case "terminal_lost":
      return end("ended", "The sandbox was stopped, and the terminal with it. Press Enter for a new one.");
    case "terminal_not_found":
      return end("ended", "The terminal was closed. Press Enter for a new one.");
    case "node_unavailable":
      return retry("The node is shutting down or starting.");
  }
  if (problem.status === 503 || problem.status === 504) return retry(detail);
  end("failed", detail, "Try again");
}

// ---- Login

function askForToken(reason) {
  show("login", "Not logged in");
  screen.hidden = true;
  form.hidden = false;
  element("logout").hidden = true;
  element("reason").textContent = reason;
  element("token").focus();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const input = element("token"), button = form.querySelector("button");
  const token = input.value.trim();
  button.disabled = true;
  try {
    login.set(await requestURL(token));
  } catch (error) {
    return askForToken(error.message);
  } finally {
    button.disabled = false;
    input.value = "";
  }
  wanted = true;
  attempts = 0;
  start();
});

// requestURL returns the signed URL of the WebSocket.
async function requestURL(token) {
  if (!/^[\x21-\x7e]+$/.test(token)) throw new Error("A token has letters, digits and no spaces. Copy it again.");
  let response, body;
  try {
    response = await fetch(`/api/v1/sandbox/${encodeURIComponent(name)}/terminal/url`, {
      method: "POST",
      headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
      body: JSON.stringify({ expires_in: loginDuration }),
      cache: "no-store",
      credentials: "omit",
    });
    body = await response.json();
  } catch {
    throw new Error("The node does not respond. Check the connection and try again.");
  }
  if (response.ok) return body.url;
  if (body.code === "unauthorized") throw new Error("The token is not valid for this node.");
  throw new Error(body.detail ?? "The node refused the login.");
}

element("logout").addEventListener("click", () => {
  login.set(null);
  end("login", "");
  terminal.reset();
  askForToken("");
});

const reader = element("reader");
reader.setAttribute("aria-pressed", terminal.options.screenReaderMode);
reader.addEventListener("click", () => {
  const on = !terminal.options.screenReaderMode;
  terminal.options.screenReaderMode = on;
  reader.setAttribute("aria-pressed", on);
  readerMode.set(on ? "on" : "off");
});

function start() {
  element("logout").hidden = false;
  connect();
}

element("sandbox").textContent = name;
document.title = `${name}: terminal`;
if (login.get()) start();
else askForToken("");
