-- Extends many leases, each only if it is still its owner's. Never creates one, never shortens to nothing.
--
-- KEYS[2i-1] lock or job  KEYS[2i] its fence, for each lease i
-- ARGV[6i-5] 'lock' or 'job', 'exact' for a lock's lease that may be shortened  ARGV[6i-4] owner  ARGV[6i-3] token
-- ARGV[6i-2] lease (ms)  ARGV[6i-1] retention of the fence (ms)  ARGV[6i] lock delay (ms)
-- Returns a list: 1 for a renewed lease, else the text of why it is lost

local function renew_lock(key, fence_key, index, owner, text, lease, retention, delay, exactly)
  local lock, bad = lock_at(index)
  if bad then
    return lost_to(bad, 'key'), bad
  end
  if not lock.owner then
    if lock.evicted == text then
      return 'broken: ' .. (lock.reason or '')
    end
    return 'the server has no such lease any more'
  end
  if lock.owner ~= owner or lock.text ~= text then
    return 'taken over by ' .. (lock.by or lock.owner)
  end
  if lock.ends and tonumber(lock.ends) < now_us() / 1000 then
    return 'the lease ran out'
  end
  local fence, bad_fence = fence_at(index + 1)
  if bad_fence then
    return lost_to(bad_fence, 'fence'), bad_fence
  end
  if fence > lock.token then
    return 'fenced out by token ' .. digits(fence)
  end
  local life = lease + delay
  if fence < lock.token then
    redis.call('SET', fence_key, text, 'PX', digits(math.max(retention, life)))
  else
    keep_for(fence_key, digits(math.max(retention, life)))
  end
  run_for(key, lock.ends, lease, delay, exactly)
  return 1
end

local function renew_job(key, index, owner, text, lease)
  local job, bad = fields(index, 's', 't', 'o', 'b')
  if bad then
    return lost_to(bad, 'key'), bad
  end
  if not job[1] then
    return 'the server has no such claim any more'
  end
  if job[1] ~= 'p' or job[2] ~= text or job[3] ~= owner then
    return 'taken over by ' .. (job[4] or 'an attempt that has ended')
  end
  local fence, bad_fence = fence_at(index + 1)
  if bad_fence then
    return lost_to(bad_fence, 'fence'), bad_fence
  end
  if fence > token_of(text) then
    return 'fenced out by token ' .. digits(fence)
  end
  -- The expiry first: Redis allows it though it is out of memory, and what follows a write with it.
  redis.call('PEXPIRE', key, digits(math.max(lease, redis.call('PTTL', key))))
  redis.call('HSET', key, 'l', digits(now_us() / 1000 + lease))
  return 1
end

local answers = {}
for i = 1, #KEYS / 2 do
  local key, fence_key, at = KEYS[2 * i - 1], KEYS[2 * i], 6 * i - 5
  local owner, text, lease = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local answer, bad
  if ARGV[at] == 'job' then
    answer, bad = renew_job(key, 2 * i - 1, owner, text, lease)
  else
    local retention, delay = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
    answer, bad = renew_lock(
      key, fence_key, 2 * i - 1, owner, text, lease, retention, delay, ARGV[at] == 'exact')
  end
  if not answer then return bad end
  answers[i] = answer
end
return answers
