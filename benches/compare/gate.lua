-- What the scripts beside this one share. It is put before each of them.
--
-- gate             hash: ceiling, tokens reserved, leases issued, tickets that wait, waits counted
-- t:TICKET         hash of a ticket that waits or holds a lease; a string, the lease id, once it is released
-- s:SESSION        hash: leases and tokens held, tickets that wait
-- queue            list of the tickets that wait, oldest first
-- deadlines        sorted set: tickets with a lease, by the end of it
-- granted:TICKET   list of one: the lease id for a caller that waits

local FINISHED_S = 600
local WAITING_MAX = 100000

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function read_gate()
  local fields = redis.call('HMGET', 'gate', 'ceiling', 'reserved', 'issued', 'waiting', 'waits')
  return {
    ceiling = tonumber(fields[1]),
    reserved = tonumber(fields[2] or 0),
    issued = tonumber(fields[3] or 0),
    waiting = tonumber(fields[4] or 0),
    waits = tonumber(fields[5] or 0),
  }
end

-- Charges the ledger and names the lease.
local function charge(gate, ticket, session, tokens, ttl_s, now)
  gate.issued = gate.issued + 1
  gate.reserved = gate.reserved + tokens
  local deadline = now + ttl_s * 1000
  redis.call('ZADD', 'deadlines', deadline, ticket)
  redis.call('HINCRBY', 's:' .. session, 'leases', 1)
  redis.call('HINCRBY', 's:' .. session, 'tokens', tokens)
  return '1-' .. gate.issued, deadline
end

-- A lease is over, however it ended.
local function discharge(gate, ticket, session, tokens)
  gate.reserved = gate.reserved - tokens
  redis.call('ZREM', 'deadlines', ticket)
  redis.call('HINCRBY', 's:' .. session, 'leases', -1)
  redis.call('HINCRBY', 's:' .. session, 'tokens', -tokens)
end

-- Grants leases to the head of the queue for as long as it fits: nothing overtakes it. Writes what has changed since the
-- gate was read, which is less where nobody waits.
local function advance(gate)
  local now
  while gate.waiting > 0 do
    local ticket = redis.call('LINDEX', 'queue', 0)
    local row = redis.call('HMGET', 't:' .. ticket, 'session', 'tokens', 'ttl_s')
    local session, tokens = row[1], tonumber(row[2])
    if gate.reserved + tokens > gate.ceiling then
      break
    end
    now = now or now_ms()
    redis.call('LPOP', 'queue')
    gate.waiting = gate.waiting - 1
    redis.call('HINCRBY', 's:' .. session, 'waiting', -1)
    local lease, deadline = charge(gate, ticket, session, tokens, tonumber(row[3]), now)
    redis.call('HSET', 't:' .. ticket, 'state', 'held', 'lease', lease, 'granted', now, 'deadline', deadline)
    redis.call('RPUSH', 'granted:' .. ticket, lease)
  end
  if now then
    redis.call('HSET', 'gate', 'reserved', gate.reserved, 'issued', gate.issued, 'waiting', gate.waiting)
  else
    redis.call('HSET', 'gate', 'reserved', gate.reserved)
  end
end
