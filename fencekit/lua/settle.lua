-- Ends a claim: done with a result, failed for good, or free for another attempt; frees its lock in the
-- same step. Accepted by owner and token, never by time (I5); a repeat is accepted again (I7).
--
-- KEYS[1] job  KEYS[2] lock (only with a lock in the same slot)
-- ARGV[1] owner  ARGV[2] token, '' to go by the owner alone
-- ARGV[3] new state: 'd' done, 'f' failed, 'x' free
-- ARGV[4] '1' if there is a result or error to keep  ARGV[5] that text
-- ARGV[6] life of the record from now (ms), 0 as it is
-- ARGV[7] channel for the job's waiters  ARGV[8] channel for the lock's waiters
-- Returns {1} settled
--         {0, state or '', token or '', result or false, holder label or ''} not this owner's

local job, bad = fields(1, 's', 't', 'o', 'r', 'b', 'n', 'l')
if bad then return bad end
if not job[1] and redis.call('EXISTS', KEYS[1]) == 1 then
  return foreign(1)
end
if job[1] and not is_job(job[1], job[2], job[6], job[7]) then
  return foreign(1)
end
local lock
if KEYS[2] then
  lock, bad = lock_at(2)
  if bad then return bad end
end

local kept = ARGV[4] == '1' and ARGV[5]
local mine = job[1] == 'p' and job[3] == ARGV[1] and (ARGV[2] == '' or job[2] == ARGV[2])
local again = ARGV[2] ~= '' and job[1] == ARGV[3] and job[2] == ARGV[2] and job[4] == kept
if lock and lock.owner == ARGV[1] and lock.text == ARGV[2] then
  redis.call('DEL', KEYS[2])
  tell(ARGV[8])
end
if not mine and not again then
  return {0, job[1] or '', job[2] or '', job[4], job[5] or ''}
end
if mine then
  redis.call('HDEL', KEYS[1], 'o', 'l', 'b', 'c', 'u')
  local record = {'s', ARGV[3], 'a', digits(now_us() / 1000)}
  if kept then
    record[5], record[6] = 'r', kept
  end
  redis.call('HSET', KEYS[1], unpack(record))
  if ARGV[6] ~= '0' then
    redis.call('PEXPIRE', KEYS[1], ARGV[6])
  end
  tell(ARGV[7])
end
return {1}
