"""When each piece of an algorithm runs: schedules as traces, in cycles of the SM."""
