import { detail } from "./detail.js";
import { heading } from "./heading.js";

const show = (element, text) => {
  document.querySelector(element).textContent = text;
};
show("h1", heading);
show("h2", detail);
import.meta.hot.accept("./heading.js", (changed) => show("h1", changed.heading));
import.meta.hot.accept("./detail.js", (changed) => show("h2", changed.detail));

// What the page says over the WebSocket of HMR comes back by vite.config.js.
window.ask = (text) => import.meta.hot.send("page:ask", text);
import.meta.hot.on("page:answer", (text) => show("p", text));
