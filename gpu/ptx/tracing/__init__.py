"""What a launch did and in which order: runs of the executor as traces.events.Trace."""
