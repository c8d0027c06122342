-- Reads who holds a lock. Changes nothing.
--
-- KEYS[1] lock  KEYS[2] fence
-- ARGV[1] channel on which waiters listen
-- Returns {fence} when it is free, else
--         {fence, owner, token, holder label, age (ms), time left (ms), waiting processes}

local lock, bad = lock_at(1)
if bad then return bad end
local fence, bad_fence = fence_at(2)
if bad_fence then return bad_fence end

if not lock.owner then
  return {digits(fence)}
end
local since = tonumber(redis.call('HGET', KEYS[1], 'since') or '0')
local waiting = redis.call('PUBSUB', 'NUMSUB', ARGV[1])
local left = redis.call('PTTL', KEYS[1])
if lock.ends then
  left = tonumber(lock.ends) - now_us() / 1000
end
return {
  digits(fence), lock.owner, lock.text, lock.by,
  digits((now_us() - since) / 1000), digits(left), waiting[2],
}
