-- The common part of all scripts.
local HASH, ITEMS, RATE = KEYS[1], KEYS[2], KEYS[3]
-- The token; the time of the caller, so that one clock measures a rate; how long final counts stay. Times are in milliseconds.
local TOKEN, NOW, KEEP = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local FINAL = { DONE = true, FAILED = true }
local OPEN = { INITIALIZING = true, CRAWLING = true, PROCESSING_WAIT = true, PROCESSING = true }

-- The answer to a command; nil if the key has another type. Other errors, such as MASTERDOWN, fail the script, because they say
-- nothing about the counts.
local function ask(...)
    local reply = redis.pcall(...)
    if type(reply) ~= 'table' or not reply.err then return reply end
    if string.find(reply.err, 'WRONGTYPE', 1, true) then return nil end
    return redis.call(...)
end

-- A number that Redis can increment and that a script represents exactly; nil for everything else.
local function whole(text)
    if not text or #text > 15 or not (text == '0' or string.match(text, '^[1-9]%d*$')) then return nil end
    return tonumber(text)
end

-- The counts of this token; nil if they are lost: evicted, flushed, of an earlier initialisation, or reset or damaged by another
-- program. Everything is checked before the first write, because a script that fails is not rolled back.
local function load()
    if ask('SISMEMBER', ITEMS, TOKEN) ~= 1 then return nil end
    local fields = ask('HMGET', HASH, 'status', 'total', 'done', 'errors')
    local times = ask('HMGET', RATE, 'at', 'value', 'since', 'ended')
    if not fields or not times then return nil end
    local status, total, done, errors = fields[1], whole(fields[2]), whole(fields[3]), whole(fields[4])
    if not (FINAL[status] or OPEN[status]) or not total or not done or not errors then return nil end
    -- Fewer than were counted: the hash was reset. So it was if the project had ended.
    local items, ended = redis.call('SCARD', ITEMS) - 1, whole(times[4])
    if done < items or (ended and OPEN[status]) then return nil end
    local rate = { tonumber(times[1]), tonumber(times[2]), tonumber(times[3]) }
    return { status = status, total = total, done = done, errors = errors, items = items, counted = 0, ended = ended,
        rate = rate[1] and rate[2] and rate[3] and rate or nil, known = 0 }
end

-- Keeps final counts until they are archived. The ids are no longer needed; the token stays, so that the counts are not lost.
local function settle(state)
    if not FINAL[state.status] or state.ended then return end
    state.ended = NOW
    redis.call('HSET', RATE, 'ended', ARGV[2])
    redis.call('UNLINK', ITEMS)
    redis.call('SADD', ITEMS, TOKEN)
    local ttl = math.max(KEEP, redis.call('PTTL', HASH))
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
end

-- Completes the project if it is at the finish line.
local function finish(state)
    if OPEN[state.status] and state.status ~= 'CRAWLING' and state.total > 0 and state.done >= state.total then
        redis.call('HSET', HASH, 'status', 'DONE')
        state.status = 'DONE'
    end
    settle(state)
end

-- Gives the rate the TTL of the hash, and never none, whatever happened to the hash.
local function expire_rate()
    if redis.call('PTTL', RATE) < 0 then redis.call('PEXPIRE', RATE, math.max(1000, redis.call('PTTL', HASH))) end
end

local function answer(state)
    local numbers = { state.total, state.done, state.errors, state.counted, state.ended or 0, state.known }
    local rate = {}
    for at, value in ipairs(state.rate or {}) do rate[at] = tostring(value) end
    return { 'ok', state.status, numbers, rate }
end

local function failed(outcome)
    return { outcome, '', {}, {} }
end
