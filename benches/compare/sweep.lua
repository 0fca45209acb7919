-- Reclaims leases whose end has come. ARGV: milliseconds by which to look ahead
-- Answers how many there were, at most 1,000 a call.

local due = redis.call('ZRANGE', 'deadlines', '-inf', now_ms() + ARGV[1], 'BYSCORE', 'LIMIT', 0, 1000)
if #due == 0 then
  return 0
end
local gate = read_gate()
for _, ticket in ipairs(due) do
  local row = redis.call('HMGET', 't:' .. ticket, 'session', 'tokens')
  discharge(gate, ticket, row[1], tonumber(row[2]))
  redis.call('DEL', 't:' .. ticket, 'granted:' .. ticket)
end
redis.call('HINCRBY', 'gate', 'expired', #due)
advance(gate)
return #due
