-- ARGV: ticket, session, prompt_tokens, max_new_tokens, scope, protected, ttl_s, request_id, client
-- Answers {admit, lease, repeated}, {wait, position}, {bypass, reason}, {cancelled} or {conflict}.

local ticket, session, prompt, new = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local row = 't:' .. ticket
local known = redis.pcall('HMGET', row, 'state', 'lease', 'session', 'prompt', 'new')
if known.err then
  return { 'cancelled' }
end
if known[1] then
  if known[3] ~= session or known[4] ~= prompt or known[5] ~= new then
    return { 'conflict' }
  elseif known[1] == 'held' then
    redis.call('DEL', 'granted:' .. ticket)
    return { 'admit', known[2], 1 }
  end
  return { 'wait', redis.call('LPOS', 'queue', ticket) + 1 }
end
if ARGV[6] == '1' then
  return { 'bypass', 'protected' }
end

local gate = read_gate()
local tokens = prompt + new
if tokens > gate.ceiling then
  return { 'bypass', 'oversize' }
end
if gate.waiting >= WAITING_MAX then
  return { 'bypass', 'queue_full' }
end

local now = now_ms()
local lease, deadline
if gate.waiting == 0 and gate.reserved + tokens <= gate.ceiling then
  lease, deadline = charge(gate, ticket, session, tokens, tonumber(ARGV[7]), now)
  redis.call('HSET', 'gate', 'reserved', gate.reserved, 'issued', gate.issued)
else
  gate.waiting = redis.call('RPUSH', 'queue', ticket)
  redis.call('HINCRBY', 's:' .. session, 'waiting', 1)
  redis.call('HSET', 'gate', 'waiting', gate.waiting, 'waits', gate.waits + 1)
end
redis.call('HSET', row, 'state', lease and 'held' or 'waiting', 'lease', lease or '', 'session', session, 'tokens', tokens,
  'prompt', prompt, 'new', new, 'scope', ARGV[5], 'ttl_s', ARGV[7], 'request_id', ARGV[8], 'client', ARGV[9],
  'asked', now, 'granted', now, 'deadline', deadline or 0)
if lease then
  return { 'admit', lease, 0 }
end
return { 'wait', gate.waiting }
