-- Forgets a job, so that it may be started again, or answers for one whose outcome is unknown.
--
-- KEYS[1] job
-- ARGV[1] 'clear', or 'resolve' a claim whose outcome is unknown as done
-- ARGV[2] '1' if there is a result to keep  ARGV[3] that result
-- ARGV[4] life of the record from now (ms), 0 as it is  ARGV[5] channel for the job's waiters
-- Returns 1 done, 0 there was no such record (or, for 'resolve', its outcome is not unknown)

local job, bad = fields(1, 's', 'l', 'u', 't', 'n')
if bad then return bad end
if not job[1] then
  if redis.call('EXISTS', KEYS[1]) == 1 then
    return foreign(1)
  end
  return 0
end
if not is_job(job[1], job[4], job[5], job[2]) then
  return foreign(1)
end
if ARGV[1] == 'clear' then
  redis.call('DEL', KEYS[1])
else
  local lapsed = job[2] and tonumber(job[2]) <= now_us() / 1000
  if job[1] ~= 'p' or not job[3] or not lapsed then
    return 0
  end
  redis.call('HDEL', KEYS[1], 'o', 'l', 'b', 'c', 'u')
  redis.call('HSET', KEYS[1], 's', 'd', 'a', digits(now_us() / 1000))
  if ARGV[2] == '1' then
    redis.call('HSET', KEYS[1], 'r', ARGV[3])
  end
  if ARGV[4] ~= '0' then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
  end
end
tell(ARGV[5])
return 1
