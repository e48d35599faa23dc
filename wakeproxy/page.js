"use strict";
const { wake: wakePath, status: statusPath } = document.body.dataset;

// Consecutive loads of the page double the pause before the next one, so that a server that
// responds to no request is not polled continuously.
const reloads = {
  key: "doze-reloads",
  read() {
    try {
      const { count, at } = JSON.parse(sessionStorage.getItem(this.key));
      return Date.now() - at < 5 * 60 * 1000 ? count : 0;
    } catch {
      return 0;
    }
  },
  reload() {
    try {
      sessionStorage.setItem(this.key, JSON.stringify({ count: this.read() + 1, at: Date.now() }));
    } catch {
      // Not allowed in this frame: then each load is the first.
    }
    location.reload();
  },
};

let pause = Math.min(1000 * 2 ** reloads.read(), 60000);

// Polls wake nothing. A page that is not visible does not poll.
async function poll() {
  if (document.visibilityState === "visible") {
    try {
      const response = await fetch(statusPath, { cache: "no-store" });
      if (response.status === 404) return location.reload(); // the preview is gone, as the page then shows
      if (response.ok && (await response.json()).listening) return reloads.reload();
    } catch {
      // The node starts again, or the network does.
    }
    pause = Math.min(pause * 1.5, 60000);
  }
  setTimeout(poll, pause);
}

function show(problem) {
  document.body.className = "failed";
  document.title = problem.title;
  document.getElementById("title").textContent = problem.title;
  document.getElementById("detail").textContent = problem.detail;
  const output = problem.process?.output || problem.container_output;
  if (output) {
    const pre = Object.assign(document.createElement("pre"), { textContent: output });
    document.getElementById("detail").after(pre);
  }
  const again = document.getElementById("again");
  again.textContent = problem.code === "sandbox_stopped" ? "Start the sandbox" : "Try again";
  again.hidden = false;
}

// The sandbox wakes: wait for it, then load the page.
function listen() {
  const source = new EventSource(wakePath);
  source.addEventListener("ready", () => {
    source.close();
    location.reload();
  });
  source.addEventListener("failed", (event) => {
    source.close();
    show(JSON.parse(event.data));
    setTimeout(poll, pause);
  });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(poll, pause);
  });
}

if (wakePath) listen();
else if (statusPath) setTimeout(poll, pause);
