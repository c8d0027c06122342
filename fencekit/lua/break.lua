-- Takes a lock from its holder, for operators. Raises the fence first, so the holder's writes bounce
-- (I3) and its next renewal is told why.
--
-- KEYS[1] lock  KEYS[2] fence
-- ARGV[1] reason  ARGV[2] retention of the fence (ms)  ARGV[3] how long to remember the eviction (ms)
-- ARGV[4] channel to tell waiters
-- Returns {new fence} when nobody held it, else {new fence, owner, token, holder label}

local lock, bad = lock_at(1)
if bad then return bad end
local fence, bad_fence = fence_at(2)
if bad_fence then return bad_fence end

-- (The deletion first: Redis allows it though it is out of memory, and what follows a write with it.)
local raised = digits(math.max(fence + 1, now_us()))
if lock.owner then
  redis.call('DEL', KEYS[1])
end
redis.call('SET', KEYS[2], raised, 'PX', ARGV[2])
if not lock.owner then
  return {raised}
end
redis.call('HSET', KEYS[1], 'evicted', lock.text, 'reason', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
tell(ARGV[4])
return {raised, lock.owner, lock.text, lock.by}
