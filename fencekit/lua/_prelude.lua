-- What every script shares; put in front of each when it is loaded.
-- Reads come before writes in every script, so a foreign value aborts it with nothing changed.

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A token as stored, or nil: digits without a leading zero, exact in a double, as is its successor.
local function token_of(text)
  if text and #text <= 16 and string.match(text, '^[1-9]%d*$') then
    local number = tonumber(text)
    if number < 9007199254740991 then
      return number
    end
  end
end

-- Lua's own formatting keeps 14 digits.
local function digits(number)
  return string.format('%.0f', number)
end

local function foreign(index)
  return redis.error_reply('FOREIGN ' .. index)
end

-- The fields of the hash at KEYS[index], or nil and the error to return.
local function fields(index, ...)
  local values = redis.pcall('HMGET', KEYS[index], ...)
  if values.err then
    if string.find(values.err, 'WRONGTYPE', 1, true) then
      return nil, foreign(index)
    end
    return nil, values
  end
  return values
end

-- The token in the string at KEYS[index] (0 when absent), or nil and the error to return.
local function fence_at(index)
  local text = redis.pcall('GET', KEYS[index])
  if not text then
    return 0
  end
  if type(text) == 'table' then
    if string.find(text.err, 'WRONGTYPE', 1, true) then
      return nil, foreign(index)
    end
    return nil, text
  end
  local token = token_of(text)
  if not token then
    return nil, foreign(index)
  end
  return token
end

-- Wakes waiters. Only a hint: a user who may not publish must not break what was done.
local function tell(channel)
  redis.pcall('PUBLISH', channel, '1')
end

-- Why a record is lost if it is foreign; nothing for an error that says nothing about the record.
local function lost_to(bad, what)
  if string.find(bad.err, 'FOREIGN', 1, true) then
    return 'something else is at its ' .. what
  end
end

-- An expiry is lengthened, never shortened.
local function keep_for(key, ms)
  if redis.call('PTTL', key) < tonumber(ms) then
    redis.call('PEXPIRE', key, ms)
  end
end

-- The lock at KEYS[index], or nil and the error to return.
-- owner is false when it is free: absent, or a tombstone (a spent nonce, or an eviction).
local function lock_at(index)
  local values, bad = fields(index, 'owner', 'token', 'nonce', 'by', 'evicted', 'reason', 'until')
  if bad then
    return nil, bad
  end
  local lock = {
    owner = values[1], text = values[2], token = token_of(values[2]), nonce = values[3],
    by = values[4], evicted = values[5], reason = values[6], ends = values[7],
  }
  lock.tombstone = not lock.owner and (lock.nonce or lock.evicted) and true or false
  if lock.owner and not lock.token then
    return nil, foreign(index)
  end
  if not lock.owner and not lock.tombstone and redis.call('EXISTS', KEYS[index]) == 1 then
    return nil, foreign(index)
  end
  return lock
end

-- Whether these can be a job's state, token, attempts and lease end: if not, its record is foreign.
local function is_job(state, token, attempts, lapses)
  return #state == 1 and string.find('pdfx', state, 1, true) and token_of(token)
    and (not attempts or tonumber(attempts)) and (not lapses or tonumber(lapses))
end

-- Lets the lease at `key` run for so long from now. Only `exactly` may bring its end forward: a beat
-- or a late copy of an acquire may have been overtaken by an extension.
local function run_for(key, ends, lease, delay, exactly)
  if delay > 0 then
    local moment = now_us() / 1000 + lease
    if exactly or not ends or tonumber(ends) < moment then
      redis.call('HSET', key, 'until', digits(moment))
    end
  end
  if exactly then
    redis.call('PEXPIRE', key, digits(lease + delay))
  else
    keep_for(key, digits(lease + delay))
  end
end

-- Writes a grant: the fence first, so that no lock is ever ahead of its fence.
local function grant(lock_key, fence_key, lock, token, since, owner, by, nonce, lease, retention, delay)
  local life = tonumber(lease) + delay
  redis.call('SET', fence_key, digits(token), 'PX', digits(math.max(tonumber(retention), life)))
  if lock.tombstone or lock.owner then
    redis.call('DEL', lock_key)
  end
  redis.call('HSET', lock_key, 'owner', owner, 'token', digits(token), 'since', digits(since),
    'by', by, 'nonce', nonce)
  if delay > 0 then
    redis.call('HSET', lock_key, 'until', digits(since / 1000 + lease))
  end
  redis.call('PEXPIRE', lock_key, digits(life))
end
