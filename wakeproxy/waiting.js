"use strict";
const source = new EventSource(document.body.dataset.wake);
source.addEventListener("ready", () => {
  source.close();
  location.reload();
});
source.addEventListener("failed", (event) => {
  source.close();
  const problem = JSON.parse(event.data);
  document.body.className = "failed";
  document.title = problem.title;
  document.getElementById("title").textContent = problem.title;
  document.getElementById("detail").textContent = problem.detail;
  const words = problem.process?.output || problem.last_log;
  if (words) {
    document.querySelector("main").append(Object.assign(document.createElement("pre"), { textContent: words }));
  }
});
source.addEventListener("error", () => {
  // Closed for good, such as by a preview that is gone: the page itself says why.
  if (source.readyState === EventSource.CLOSED) {
    setTimeout(() => location.reload(), 2000);
  }
});
