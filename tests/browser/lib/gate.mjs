// A real kvgate, on ports of its own and in a directory of its own. It is ended by its own id.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { rmSync } from "node:fs";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { setTimeout as rest } from "node:timers/promises";
import { engine } from "./servers.mjs";

const BINARY = process.env.KVGATE_BIN;
// What the checks are told by variables is no setting of the gate, which refuses those that it does not know.
const SURROUNDINGS = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("KVGATE_")));

// A runner that is ended takes what it started with it.
process.setMaxListeners(0);
process.once("SIGTERM", () => process.exit(143));

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
  process.once("exit", () => rmSync(made, { recursive: true, force: true }));
  return made;
}

export class Gate {
  /** `kvgate demo`, or `kvgate serve` with the arguments given. */
  static async start(args, options) {
    const gate = new Gate();
    await gate.begin(args, options);
    return gate;
  }

  async begin(args, { token } = {}) {
    this.args = args;
    this.token = token;
    this.data = await directory();
    this.listen = "127.0.0.1:0";
    await this.run();
  }

  async run() {
    const args = [...this.args, "--listen", this.listen, "--data", this.data];
    await rm(path.join(this.data, "address"), { force: true });
    this.log = "";
    this.child = spawn(BINARY, args, { env: { ...SURROUNDINGS, NO_COLOR: "1" }, stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.child.stdout, this.child.stderr]) {
      stream.setEncoding("utf8").on("data", (text) => (this.log += text));
    }
    this.ended = once(this.child, "exit");
    const { child } = this;
    process.once("exit", () => child.kill("SIGKILL"));
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
    if (this.child && this.child.exitCode === null && this.child.signalCode === null) {
      this.child.kill("SIGTERM");
      await this.ended;
    }
  }

  async call(method, at, body, headers = {}, signal = undefined) {
    const answer = await fetch(`${this.url}${at}`, {
      method,
      headers: {
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...(this.token ? { authorization: `Bearer ${this.token}` } : {}),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      redirect: "manual",
      signal,
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

  /** What operators did, newest first. */
  async audit() {
    return (await this.get("/v1/audit?limit=1000")).json.items;
  }

  state() {
    return this.get("/v1/state").then((answer) => answer.json);
  }
}

/** Waiting tickets stay in the queue while a call waits for them: this one, again and again. */
class Presence {
  constructor(gate) {
    this.gate = gate;
    this.tickets = new Set();
    this.leaving = new AbortController();
    this.over = this.run();
  }

  async run() {
    while (!this.leaving.signal.aborted) {
      try {
        const tickets = [...this.tickets];
        if (!tickets.length) {
          await rest(50, undefined, { signal: this.leaving.signal });
          continue;
        }
        // Short calls, so that tickets that came meanwhile are soon among them.
        for (let from = 0; from < tickets.length; from += 1_000) {
          const body = { ticket_ids: tickets.slice(from, from + 1_000), wait_s: tickets.length > 1_000 ? 0 : 5 };
          const { json } = await this.gate.call("POST", "/v1/wait", body, {}, this.leaving.signal);
          for (const decided of json?.results ?? []) this.tickets.delete(decided.ticket_id);
        }
        if (tickets.length > 1_000) await rest(5_000, undefined, { signal: this.leaving.signal });
      } catch {
        // The gate is away for a moment, or the test is over.
        await rest(100);
      }
    }
  }

  async end() {
    this.leaving.abort();
    await this.over;
  }
}

/** A gate before engines of the test's own, with nobody else at it. */
export class House {
  static async start({ args = [], engines = 3, capacity = 400_000, token } = {}) {
    const house = new House();
    house.engines = await Promise.all(Array.from({ length: engines }, (_, number) => engine({ capacity: capacity + number * 8_000 })));
    const features = ["--program-admission", "--session-lifecycle", "--admission-max-wait-s", "86400", "--claim-grace-s", "60"];
    const named = house.engines.flatMap((one) => ["--engine", one.url]);
    house.gate = new Gate();
    try {
      await house.gate.begin(["serve", ...named, ...features, ...args], { token });
      await until("a ceiling", async () => (await house.gate.state()).budget.ceiling > 0);
    } catch (error) {
      await house.stop();
      throw error;
    }
    house.presence = new Presence(house.gate);
    return house;
  }

  /** Asks for all of them at once; those that wait are kept in the queue. */
  async acquire(wanted) {
    const results = [];
    for (let from = 0; from < wanted.length; from += 1_000) {
      const operations = wanted.slice(from, from + 1_000).map(([ticket, session, tokens, more]) => ({
        op: "acquire",
        ticket_id: ticket,
        session_id: session,
        reservation_tokens: tokens,
        ...more,
      }));
      const answer = await this.gate.post("/v1/batch", { operations });
      assert.equal(answer.status, 200, answer.text);
      results.push(...answer.json.results);
    }
    for (const { status, body } of results) if (status === 202) this.presence.tickets.add(body.ticket_id);
    return results;
  }

  /** Leases that hold most of the ceiling, and waiters that do not fit beside them. */
  async fill({ leases = 12, waiters = 20 } = {}) {
    const { budget } = await this.gate.state();
    const part = Math.floor(budget.ceiling / (leases + 1));
    const held = Array.from({ length: leases }, (_, number) => [
      `held-${number}`,
      `session-${number % 5}`,
      part,
      { client: `rollout-${number % 3}`, request_id: `rid-${number}`, ttl_s: 3_600 },
    ]);
    const waiting = Array.from({ length: waiters }, (_, number) => [`waits-${number}`, `line-${number}`, part * 2 + number, { client: "rollout-9" }]);
    const results = await this.acquire([...held, ...waiting]);
    assert.deepEqual(
      results.map((result) => result.status),
      [...held.map(() => 200), ...waiting.map(() => 202)],
    );
    return { part, leases: results.slice(0, leases).map((result) => result.body.lease_id) };
  }

  /** Closes of sessions that an engine refused. */
  async failedCloses(sessions) {
    this.engines[0].refuses = true;
    for (const session of sessions) await this.gate.post(`/v1/sessions/${session}/close`);
    const failed = await until("failed closes", async () => {
      const { items } = (await this.gate.get("/v1/closes?failed=true")).json;
      const found = sessions.map((session) => items.find((close) => close.session_id === session));
      return found.every(Boolean) && found;
    });
    this.engines[0].refuses = false;
    return failed.map((close) => close.close_id);
  }

  async stop() {
    await this.presence?.end();
    await this.gate.stop();
    for (const one of this.engines) one.stop();
  }
}
