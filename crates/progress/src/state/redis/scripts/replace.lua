
-- Arguments: the request, or an empty text; the expected status and total; the new status and total.
local REQUESTS_MAX = 1000

-- Remembers that a request had its effect, so that a repeat has none. Of too many, the older half is forgotten.
local function remember(request)
    redis.call('HSET', RATE, request, ARGV[2])
    expire_rate()
    if redis.call('HLEN', RATE) <= REQUESTS_MAX then return end
    local fields, requests = redis.call('HGETALL', RATE), {}
    for at = 1, #fields, 2 do
        if string.sub(fields[at], 1, 8) == 'request:' then
            table.insert(requests, { name = fields[at], time = tonumber(fields[at + 1]) or 0 })
        end
    end
    table.sort(requests, function(one, other) return one.time < other.time end)
    for at = 1, math.floor(#requests / 2) do redis.call('HDEL', RATE, requests[at].name) end
end

local state = load()
if not state then return failed('lost') end
if ARGV[4] ~= '' and redis.call('HEXISTS', RATE, ARGV[4]) == 1 then
    settle(state)
    return answer(state)
end
if state.status ~= ARGV[5] or state.total ~= tonumber(ARGV[6]) then return failed('conflict') end
if ARGV[4] ~= '' then remember(ARGV[4]) end
redis.call('HSET', HASH, 'status', ARGV[7], 'total', ARGV[8])
state.status, state.total = ARGV[7], tonumber(ARGV[8])
finish(state)
return answer(state)
