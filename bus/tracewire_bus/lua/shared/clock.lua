-- Time by Redis's clock.
local clock = {}

function clock.milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
