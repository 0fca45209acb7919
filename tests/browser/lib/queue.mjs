// A gate with a long queue: 10,000 waiters and 5,000 leases on 40 engines (U03).
import assert from "node:assert/strict";
import { House } from "./gate.mjs";

const WAITERS = 10_000;
const LEASES = 5_000;
const ENGINES = 40;

export async function longQueue() {
  const house = await House.start({ engines: ENGINES, capacity: 150_000, args: ["--max-waiting", "20000"] });
  const { budget } = await house.gate.state();
  const tokens = Math.floor(budget.ceiling / LEASES);
  const name = (kind, number) => `${kind}-of-a-long-name-${number}`;
  const results = await house.acquire([
    ...Array.from({ length: LEASES }, (_, number) => [name("held", number), name("session", number % 3_000), tokens, { client: name("rollout", number % 40), ttl_s: 3_600 }]),
    ...Array.from({ length: WAITERS }, (_, number) => [name("waits", number), name("line", number), tokens * 8, { client: name("rollout", number % 40) }]),
  ]);
  assert.equal(results.filter((result) => result.status === 200).length, LEASES);
  assert.equal(results.filter((result) => result.status === 202).length, WAITERS);
  return house;
}
