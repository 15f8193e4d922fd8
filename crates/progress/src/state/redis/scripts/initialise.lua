
-- Arguments: the TTL in milliseconds, the first status. A repeat with the same token changes nothing.
local state = load()
if not state then
    redis.call('UNLINK', HASH, ITEMS, RATE)
    redis.call('HSET', HASH, 'status', ARGV[5], 'total', 0, 'done', 0, 'errors', 0)
    redis.call('SADD', ITEMS, TOKEN)
    redis.call('PEXPIRE', HASH, ARGV[4])
    redis.call('PEXPIRE', ITEMS, ARGV[4])
    state = load()
end
return answer(state)
