// A real kvgate, on ports of its own and in a directory of its own. It is ended by its own id.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { setTimeout as rest } from "node:timers/promises";

const BINARY = process.env.KVGATE_BIN;

/** Asks again until the answer is true; how long that may take is a bound, not a measure. */
export async function until(what, look, seconds = 60) {
  const end = performance.now() + seconds * 1000;
  let last;
  for (;;) {
    try {
      const found = await look();
      if (found) return found;
      last = undefined;
    } catch (error) {
      last = error;
    }
    if (performance.now() > end) throw new Error(`${what} did not come about within ${seconds} s`, { cause: last });
    await rest(50);
  }
}

/** A directory that goes when the process does. */
export async function directory() {
  const made = await mkdtemp(path.join(tmpdir(), "kvgate-browser-"));
  process.on("exit", () => rm(made, { recursive: true, force: true }));
  return made;
}

export class Gate {
  /** `kvgate demo`, or `kvgate serve` with the arguments given. */
  static async start(args, { data, env = {} } = {}) {
    const gate = new Gate();
    gate.args = args;
    gate.data = data ?? (await directory());
    gate.env = env;
    gate.listen = "127.0.0.1:0";
    await gate.run();
    return gate;
  }

  async run() {
    const args = [...this.args, "--listen", this.listen, "--data", this.data];
    await rm(path.join(this.data, "address"), { force: true });
    this.log = "";
    this.child = spawn(BINARY, args, { env: { ...process.env, ...this.env, NO_COLOR: "1" }, stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.child.stdout, this.child.stderr]) {
      stream.setEncoding("utf8").on("data", (text) => (this.log += text));
    }
    this.ended = once(this.child, "exit");
    const address = await until("the address file", async () => {
      if (this.child.exitCode !== null) throw new Error(`kvgate ended: ${this.log}`);
      return (await readFile(path.join(this.data, "address"), "utf8")).trim();
    });
    this.listen = address;
    this.url = `http://${address}`;
    await until("readiness", async () => (await fetch(`${this.url}/readyz`)).ok);
  }

  async kill() {
    this.child.kill("SIGKILL");
    await this.ended;
  }

  async stop() {
    if (this.child.exitCode === null && this.child.signalCode === null) {
      this.child.kill("SIGTERM");
      await this.ended;
    }
  }

  async call(method, at, body, headers = {}) {
    const answer = await fetch(`${this.url}${at}`, {
      method,
      headers: body === undefined ? headers : { "content-type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await answer.text();
    return { status: answer.status, headers: answer.headers, text, json: text.startsWith("{") ? JSON.parse(text) : undefined };
  }

  get(at, headers) {
    return this.call("GET", at, undefined, headers);
  }

  post(at, body = {}) {
    return this.call("POST", at, body);
  }

  /** A ticket that asks for tokens, without waiting for the decision. */
  acquire(ticket, session, tokens, more = {}) {
    return this.post("/v1/leases", { ticket_id: ticket, session_id: session, reservation_tokens: tokens, wait_s: 0, ...more });
  }

  state() {
    return this.get("/v1/state").then((answer) => answer.json);
  }
}

/** A fleet that nobody uses, and a gate in front of it, for callers of the test's own. */
export async function quiet(more = [], options = {}) {
  const fleet = await Gate.start(["demo", "--sessions", "0"]);
  const router = await until("the address of the router", () => /router=(\S+)/.exec(fleet.log)?.[1]);
  const features = ["--program-admission", "--session-lifecycle", "--admission-max-wait-s", "86400", "--claim-grace-s", "60"];
  const gate = await Gate.start(["serve", "--router", router, ...features, ...more], options);
  await until("a ceiling", async () => (await gate.state()).budget.ceiling > 0);
  return {
    gate,
    fleet,
    async stop() {
      await gate.stop();
      await fleet.stop();
    },
  };
}
