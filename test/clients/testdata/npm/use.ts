// What a program does with the generated types. It is compiled and not run.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

type Sandbox = components["schemas"]["Sandbox"];

const client = createClient<paths>({ baseUrl: "https://doze.example.com/api/v1", headers: { Authorization: "Bearer token" } });

// create returns the sandbox with this name, which exists afterwards.
export async function create(name: string): Promise<Sandbox> {
  const { data, error } = await client.POST("/sandbox", { body: { name, labels: { team: "web" }, sleep_after: "60s" } });
  if (error !== undefined) {
    throw new Error(`${error.code}: ${error.detail}`);
  }
  return data;
}

// find returns undefined if the sandbox does not exist.
export async function find(id: string): Promise<Sandbox | undefined> {
  const { data, error, response } = await client.GET("/sandbox/{id}", { params: { path: { id } } });
  if (error === undefined) {
    return data;
  }
  switch (error.code) {
    case "sandbox_not_found":
      return undefined;
    case "request_invalid":
      throw new Error((error.errors ?? []).map((e) => `${e.location}: ${e.message}`).join("; "));
    default:
      throw new Error(`${response.status} ${error.title} (${error.request_id ?? ""})`);
  }
}

export async function run(id: string, argv: string[]): Promise<string> {
  const { data } = await client.POST("/sandbox/{id}/exec", {
    params: { path: { id } },
    body: { argv, timeout: "10s" },
  });
  if (data === undefined || typeof data !== "object" || !("stdout" in data)) {
    throw new Error("no result");
  }
  const code: number = data.exit_code;
  return code === 0 ? data.stdout : data.stderr;
}

export async function listAsleep(): Promise<string[]> {
  const names: string[] = [];
  let cursor: string | undefined;
  do {
    const { data } = await client.GET("/sandbox", { params: { query: { label: ["team=web"], limit: 100, cursor } } });
    for (const sandbox of data?.sandboxes ?? []) {
      if (sandbox.state === "asleep") {
        names.push(sandbox.name);
      }
    }
    cursor = data?.next_cursor;
  } while (cursor);
  return names;
}

export async function expose(id: string, port: number): Promise<string | undefined> {
  const { data } = await client.POST("/sandbox/{id}/expose", { params: { path: { id } }, body: { port, access: "public" } });
  return data?.url;
}

export async function allow(hosts: string[], etag: string): Promise<number | undefined> {
  const { data } = await client.PUT("/egress/rules", {
    params: { header: { "If-Match": etag } },
    body: { default: "deny", rules: [{ name: "api", hosts, policies: [{ name: "bearer", secrets: { token: "api" } }] }] },
  });
  return data?.revision;
}

export async function upload(id: string, path: string, content: Blob): Promise<number | undefined> {
  const { data } = await client.PUT("/sandbox/{id}/files/write", {
    params: { path: { id }, query: { path } },
    body: content as unknown as string,
    bodySerializer: (body) => body,
    headers: { "Content-Type": "application/octet-stream" },
  });
  return data?.size;
}
