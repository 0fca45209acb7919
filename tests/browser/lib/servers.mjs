// What stands around a gate: engines whose answers a test chooses, and a proxy before it.
import { once } from "node:events";
import http from "node:http";

async function listening(server) {
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return `http://127.0.0.1:${server.address().port}`;
}

function ends(server) {
  return () => {
    server.closeAllConnections();
    server.close();
  };
}

/** An engine that answers readings, and takes closes or refuses them. */
export async function engine({ capacity = 400_000, used = 8_000 } = {}) {
  const made = { capacity, used, refuses: false };
  const server = http.createServer((request, answer) => {
    request.resume();
    if (request.url === "/metrics") {
      const gauges = {
        max_total_num_tokens: made.capacity,
        num_used_tokens: made.used,
        token_usage: made.used / made.capacity,
        num_running_reqs: 2,
        num_queue_reqs: 0,
      };
      answer.setHeader("content-type", "text/plain; version=0.0.4");
      answer.end(Object.entries(gauges).map(([name, value]) => `sglang:${name}{engine_type="unified"} ${value}\n`).join(""));
    } else if (request.url === "/close_session" && request.method === "POST") {
      answer.writeHead(made.refuses ? 400 : 200, { "content-type": "application/json" });
      answer.end(made.refuses ? '{"error":"session closes are off"}' : "{}");
    } else {
      answer.writeHead(404).end();
    }
  });
  made.url = await listening(server);
  made.stop = ends(server);
  return made;
}

/**
 * A proxy that serves a gate below a path, as the web server of a head node does. While `down` it
 * answers 503 itself; `seen` is told each request; `headers` may change those of an answer.
 */
export async function proxy(target, prefix = "/") {
  const made = { down: false, seen: () => {}, headers: (headers) => headers };
  const agent = new http.Agent({ keepAlive: false });
  const server = http.createServer((request, answer) => {
    made.seen(request);
    if (made.down || !request.url.startsWith(prefix)) {
      request.resume();
      answer.writeHead(made.down ? 503 : 404, { "content-type": "text/plain" }).end("not here\n");
      return;
    }
    const onward = new URL(request.url.slice(prefix.length - 1), target);
    const asked = http.request(onward, { agent, method: request.method, headers: request.headers }, (got) => {
      answer.writeHead(got.statusCode, made.headers(got.headers, request));
      got.pipe(answer);
    });
    asked.on("error", () => (answer.headersSent ? answer.destroy() : answer.writeHead(503).end()));
    answer.on("close", () => asked.destroy());
    request.pipe(asked);
  });
  made.url = `${await listening(server)}${prefix}`;
  made.stop = ends(server);
  return made;
}
