-- Grants a free lock with a token larger than any before (I1, I2); a repeat of the same attempt gets
-- the same grant (I7).
--
-- KEYS[1] lock  KEYS[2] fence
-- ARGV[1] owner  ARGV[2] holder label  ARGV[3] nonce of the attempt
-- ARGV[4] lease (ms)  ARGV[5] retention of the fence (ms)  ARGV[6] lock delay (ms)
-- Returns {1, token} granted
--         {0, time until it is free (ms, -1 unknown), owner, token, holder label} refused
--         {-1} this attempt was given up before

local lock, bad = lock_at(1)
if bad then return bad end
local fence, bad_fence = fence_at(2)
if bad_fence then return bad_fence end

local delay = tonumber(ARGV[6])
if lock.nonce == ARGV[3] then
  if not lock.owner then
    return {-1}
  end
  run_for(KEYS[1], lock.ends, tonumber(ARGV[4]), delay, false)
  return {1, lock.text}
end
if lock.owner then
  return {0, redis.call('PTTL', KEYS[1]), lock.owner, lock.text, lock.by}
end
local moment = now_us()
local token = math.max(fence + 1, moment)
grant(KEYS[1], KEYS[2], lock, token, moment, ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], delay)
return {1, digits(token)}
