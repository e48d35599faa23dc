import { existsSync } from "node:fs";
import { setTimeout } from "node:timers/promises";

export default async () => {
  // The test makes a start slow by this file.
  while (existsSync("slow")) await setTimeout(50);
  return { plugins: [tester] };
};

const hosts = {};

const tester = {
  name: "tester",
  configureServer(server) {
    server.ws.on("page:ask", (text, client) => client.send("page:answer", text));
    server.ws.on("connection", (_, request) => {
      hosts.socket = request.headers.host;
    });
    // Under which names the server was asked for a page and for a WebSocket.
    server.middlewares.use("/hosts", (request, response) => {
      hosts.page = request.headers.host;
      response.end(JSON.stringify(hosts));
    });
  },
};
