-- Runs commands only if the token is not older than the newest one known, and raises the fence to it, in
-- one step (I3, I4). A repeat gets the stored replies and runs nothing (I7).
--
-- KEYS[1] fence, or jobfence for a job's token  KEYS[2] op (memory of this attempt)
-- KEYS[3] job for a job's token, else the fence again  KEYS[4...] keys of the commands
-- ARGV[1] kind of the token, 'lock' or 'job'  ARGV[2] token  ARGV[3] retention of the fence (ms)
-- ARGV[4] how long to remember this attempt (ms), 0 not at all
-- ARGV[5...] the commands, each as its number of words and then the words
-- Returns {1, newest token, reply...} applied
--         {0, newest token} refused

local fence, bad = fence_at(1)
if bad then return bad end
local newest = fence
if ARGV[1] == 'job' then
  local job, bad_job = fields(3, 't')
  if bad_job then return bad_job end
  newest = math.max(fence, token_of(job[1]) or 0)
end
local remember = tonumber(ARGV[4])
if remember > 0 then
  local stored = redis.call('GET', KEYS[2])
  if stored and stored ~= '' then
    local replies = cmsgpack.unpack(stored)
    return {1, digits(newest), unpack(replies, 1, replies.n)}
  end
end
local token = tonumber(ARGV[2])
if token < newest then
  return {0, digits(newest)}
end

if remember > 0 then
  -- First of all writes: a server that is out of memory refuses it, and then nothing is done.
  redis.call('SET', KEYS[2], '', 'PX', ARGV[4])
end
-- (A job's token may be the newest one and its fence older: the record may go, the fence stays.)
if token > fence then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
else
  keep_for(KEYS[1], ARGV[3])
end
local replies, at, count = {}, 5, 0
while ARGV[at] do
  local words = tonumber(ARGV[at])
  count = count + 1
  replies[count] = redis.pcall(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
if remember > 0 then
  replies.n = count
  redis.call('SET', KEYS[2], cmsgpack.pack(replies), 'PX', ARGV[4])
end
return {1, ARGV[2], unpack(replies, 1, count)}
