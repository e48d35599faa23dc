"use strict";
const { wake: wakePath, status: statusPath } = document.body.dataset;

// Loads of the page that follow one another double the time until the next one, so
// that a server that answers no request is not asked all the time.
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

// Asking wakes nothing. Whoever does not look at the page does not ask.
async function poll() {
  if (document.visibilityState === "visible") {
    try {
      const answer = await fetch(statusPath, { cache: "no-store" });
      if (answer.status === 404) return location.reload(); // it is gone, and the page says so
      if (answer.ok && (await answer.json()).listening) return reloads.reload();
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
  const words = problem.process?.output || problem.container_output;
  if (words) {
    const pre = Object.assign(document.createElement("pre"), { textContent: words });
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
