
-- Arguments: the largest number of items, the number of items that succeeded, their ids, the ids of those that failed.
local state = load()
if not state then return failed('lost') end
if FINAL[state.status] then
    settle(state)
    return answer(state)
end

local first, max, succeeded, errors = 6, tonumber(ARGV[4]), tonumber(ARGV[5]), 0
if state.items + #ARGV - 5 > max then
    -- Repeats are accepted at the limit, too.
    local new = 0
    for at = first, #ARGV do new = new + 1 - redis.call('SISMEMBER', ITEMS, ARGV[at]) end
    if state.items + new > max then return failed('full') end
end
if succeeded > 0 then
    state.counted = redis.call('SADD', ITEMS, unpack(ARGV, first, first - 1 + succeeded))
end
if #ARGV >= first + succeeded then
    errors = redis.call('SADD', ITEMS, unpack(ARGV, first + succeeded))
    state.counted = state.counted + errors
end
if state.counted > 0 then
    state.done = redis.call('HINCRBY', HASH, 'done', state.counted)
    if errors > 0 then state.errors = redis.call('HINCRBY', HASH, 'errors', errors) end

    local value, since = 0, NOW
    if state.rate then
        value = state.rate[2] * math.exp(-math.max(0, NOW - state.rate[1]) / 30000)
        since = state.rate[3]
    end
    redis.call('HSET', RATE, 'at', ARGV[2], 'value', value + state.counted / 30, 'since', string.format('%.0f', since))
    if not state.rate then expire_rate() end
end
finish(state)
return answer(state)
