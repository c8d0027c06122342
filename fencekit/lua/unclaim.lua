-- Takes back a claim that nobody saw (I10): the start never happened, so it does not count.
--
-- KEYS[1] job  KEYS[2] lock (only with a lock in the same slot)
-- ARGV[1] nonce of the attempt  ARGV[2] how long to remember the nonce as spent (ms)
-- ARGV[3] channel for the job's waiters  ARGV[4] channel for the lock's waiters
-- Returns 1 taken back, 0 there was nothing of this attempt

local job, bad = fields(1, 's', 'n', 'c')
if bad then return bad end
local lock
if KEYS[2] then
  lock, bad = lock_at(2)
  if bad then return bad end
end

if lock and lock.nonce == ARGV[1] then
  redis.call('DEL', KEYS[2])
  tell(ARGV[4])
end
if job[1] == 'p' and job[3] and string.sub(job[3], 2) == ARGV[1] then
  redis.call('HSET', KEYS[1], 's', 'x', 'n', math.max(0, tonumber(job[2]) - 1), 'c', 'x' .. ARGV[1])
  redis.call('HDEL', KEYS[1], 'o', 'l', 'b', 'u')
  if tonumber(job[2]) <= 1 then
    redis.call('HDEL', KEYS[1], 'h')
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  tell(ARGV[3])
  return 1
end
if not job[1] and redis.call('EXISTS', KEYS[1]) == 0 then
  -- A copy may still be under way; it finds that it is spent.
  redis.call('HSET', KEYS[1], 's', 'x', 't', '1', 'n', 0, 'c', 'x' .. ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
