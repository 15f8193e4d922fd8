
-- Arguments: whether a project at the finish line becomes DONE; a request, or an empty text.
local state = load()
if not state then return failed('lost') end
if ARGV[4] == '1' then finish(state) else settle(state) end
if ARGV[5] ~= '' then state.known = redis.call('HEXISTS', RATE, ARGV[5]) end
return answer(state)
