-- Reads a job's record. Changes nothing.
--
-- KEYS[1] job
-- ARGV none
-- Returns {} when there is none, else
--         {state, attempts, token, result or false, time until the lease ends (ms) or '', holder label or '',
--          fingerprint or ''}

local job, bad = fields(1, 's', 'n', 't', 'r', 'l', 'b', 'h')
if bad then return bad end
if not job[1] then
  if redis.call('EXISTS', KEYS[1]) == 1 then
    return foreign(1)
  end
  return {}
end
if not is_job(job[1], job[3], job[2], job[5]) then
  return foreign(1)
end
local left = ''
if job[5] then
  left = digits(tonumber(job[5]) - now_us() / 1000)
end
return {job[1], tonumber(job[2] or '0'), job[3], job[4], left, job[6] or '', job[7] or ''}
