-- Gives a lock back, by owner and token, or by nonce for an attempt whose grant nobody saw (I10).
--
-- KEYS[1] lock
-- ARGV[1] owner  ARGV[2] token, '' to go by the nonce  ARGV[3] nonce
-- ARGV[4] how long to remember the nonce as spent (ms, 0 not at all)  ARGV[5] channel to tell waiters
-- Returns 1 given back, else the text of why not

local lock, bad = lock_at(1)
if bad then return bad end

local mine
if ARGV[2] == '' then
  mine = lock.owner and lock.nonce == ARGV[3]
else
  mine = lock.owner == ARGV[1] and lock.text == ARGV[2]
end
local spent = tonumber(ARGV[4])
if mine then
  redis.call('DEL', KEYS[1])
end
if spent > 0 and (mine or not lock.owner) then
  redis.call('HSET', KEYS[1], 'nonce', ARGV[3])
  keep_for(KEYS[1], ARGV[4])
end
if mine then
  tell(ARGV[5])
  return 1
end
if lock.owner then
  return 'taken over by ' .. (lock.by or lock.owner)
end
if lock.evicted and lock.evicted == ARGV[2] then
  return 'broken: ' .. (lock.reason or '')
end
return 'it lapsed'
