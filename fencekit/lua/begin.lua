-- Starts a job, or says why not. At most one start per record while its lease lives (I5); a repeat of
-- the same attempt gets the same claim (I7). With a lock it takes that too, in the same step.
--
-- KEYS[1] job  KEYS[2] jobfence  KEYS[3] lock  KEYS[4] fence (the last two only with a lock)
-- ARGV[1] owner  ARGV[2] holder label  ARGV[3] nonce of the attempt
-- ARGV[4] life of the record (ms)  ARGV[5] lease (ms), 0: the claim lives as long as the record
-- ARGV[6] fingerprint or ''  ARGV[7] most attempts, 0 no limit  ARGV[8] '1' if an unknown outcome blocks
-- ARGV[9] retention of the fence (ms)
-- ARGV[10] 'take' the lock with the job; 'free': a claim without a lease may be taken over
--          while the lock is free; a token: may be taken over while its token is this; '' neither
-- Returns {'begun' or 'reclaimed', attempts, token}
--         {'done', attempts, result or false}     {'failed', attempts, error}
--         {'busy', attempts, time left (ms), holder label}
--         {'locked', attempts, time left (ms), holder label, owner, token}  the lock is held by another
--         {'unknown', attempts, holder label}     {'conflict', fingerprint}
--         {'spent'} this attempt was given up before

local job, bad = fields(1, 's', 't', 'n', 'l', 'c', 'h', 'r', 'b', 'u')
if bad then return bad end
local state, attempts = job[1], tonumber(job[3] or '0')
local held, lapses, cookie, known, result = token_of(job[2]), job[4], job[5], job[6], job[7]
local by, blocks = job[8], job[9]
if not state and redis.call('EXISTS', KEYS[1]) == 1 then
  return foreign(1)
end
if state and not is_job(state, job[2], job[3], lapses) then
  return foreign(1)
end
local fence, bad_fence = fence_at(2)
if bad_fence then return bad_fence end
local lock
if KEYS[3] then
  lock, bad = lock_at(3)
  if bad then return bad end
end
if ARGV[10] == 'take' then
  local taken
  taken, bad_fence = fence_at(4)
  if bad_fence then return bad_fence end
  fence = math.max(fence, taken)
end

if state and ARGV[6] ~= '' and known and known ~= ARGV[6] then
  return {'conflict', known}
end
if state == 'd' then
  return {'done', attempts, result}
end
if state == 'f' then
  return {'failed', attempts, result or ''}
end

local moment = now_us()
local lease = tonumber(ARGV[5])
local outcome = 'begun'
local again = cookie and string.sub(cookie, 2) == ARGV[3]
if again and state == 'x' then
  return {'spent'}
end
if again and ARGV[10] == 'take' then
  -- Not if its lock has gone since: that may be another's by now, and is not ours to touch.
  again = lock.owner and lock.nonce == ARGV[3]
end
if again then
  -- The same attempt again: the same claim, its lease counted anew.
  if lease > 0 then
    redis.call('HSET', KEYS[1], 'l', digits(moment / 1000 + lease))
    keep_for(KEYS[1], ARGV[5])
    if ARGV[10] == 'take' then
      redis.call('PEXPIRE', KEYS[3], ARGV[5])
    end
  end
  return {string.sub(cookie, 1, 1) == 'r' and 'reclaimed' or 'begun', attempts, job[2]}
end
if state == 'p' then
  local left = redis.call('PTTL', KEYS[1])
  local takable = false
  if lapses then
    left = tonumber(lapses) - moment / 1000
    takable = left <= 0
    left = math.max(1, left)
  elseif ARGV[10] == 'free' then
    takable = not lock.owner
  else
    takable = ARGV[10] == job[2]
  end
  if not takable then
    return {'busy', attempts, digits(left), by}
  end
  if blocks then
    return {'unknown', attempts, by}
  end
  outcome = 'reclaimed'
end
if state and tonumber(ARGV[7]) > 0 and attempts >= tonumber(ARGV[7]) then
  -- Given up for good: the counter lives here because the job never got to report.
  local verdict = cjson.encode({type = 'abandoned', holder = by or ''})
  redis.call('HSET', KEYS[1], 's', 'f', 'r', verdict, 'a', digits(moment / 1000))
  redis.call('HDEL', KEYS[1], 'o', 'l', 'b', 'c', 'u')
  keep_for(KEYS[1], ARGV[4])
  return {'failed', attempts, verdict}
end
if ARGV[10] == 'take' and lock.owner and not (outcome == 'reclaimed' and lock.token == held) then
  -- (The dead attempt's own lock goes with its claim.)
  return {'locked', attempts, redis.call('PTTL', KEYS[3]), lock.by, lock.owner, lock.text}
end

local token = digits(math.max((held or 0) + 1, fence + 1, moment))
if ARGV[10] == 'take' then
  grant(KEYS[3], KEYS[4], lock, tonumber(token), moment, ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[9], 0)
end
local record = {'s', 'p', 't', token, 'o', ARGV[1], 'n', attempts + 1, 'a', digits(moment / 1000),
  'b', ARGV[2], 'c', string.sub(outcome, 1, 1) .. ARGV[3]}
local function with(field, value)
  record[#record + 1] = field
  record[#record + 1] = value
end
if lease > 0 then with('l', digits(moment / 1000 + lease)) end
if ARGV[6] ~= '' then with('h', ARGV[6]) end
if ARGV[8] == '1' then with('u', '1') end
if state then
  redis.call('HDEL', KEYS[1], 'l', 'r', 'u')
end
redis.call('HSET', KEYS[1], unpack(record))
redis.call('PEXPIRE', KEYS[1], digits(math.max(tonumber(ARGV[4]), lease)))
return {outcome, attempts + 1, token}
