-- Reads the newest token known. Changes nothing.
--
-- KEYS[1] fence, or jobfence for a job's token  KEYS[2] job for a job's token, else the fence again
-- ARGV[1] kind of the token, 'lock' or 'job'
-- Returns the newest token, '0' when none is known

local newest, bad = fence_at(1)
if bad then return bad end
if ARGV[1] == 'job' then
  local job, bad_job = fields(2, 't')
  if bad_job then return bad_job end
  newest = math.max(newest, token_of(job[1]) or 0)
end
return digits(newest)
