-- ARGV: ticket, lease
-- Answers released, already_released, lease_expired or lease_not_found.

local ticket, lease = ARGV[1], ARGV[2]
local row = 't:' .. ticket
local known = redis.pcall('HMGET', row, 'state', 'lease', 'session', 'tokens')
if known.err then
  return redis.call('GET', row) == lease and 'already_released' or 'lease_expired'
end
if not known[1] then
  return 'lease_not_found'
end
if known[1] ~= 'held' or known[2] ~= lease then
  return 'lease_expired'
end

local gate = read_gate()
discharge(gate, ticket, known[3], tonumber(known[4]))
-- The ticket is remembered, so that a late repeat is not granted again. This takes the place of the hash.
redis.call('SET', row, lease, 'EX', FINISHED_S)
advance(gate)
return 'released'
